"""Bounds on the rounding error of a product."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..kernels.formats import unit_roundoff

# A number and the matrix that it multiplies in a sum.
Addend = Tuple[float, Tensor]
# So many columns are copied to float64 at a time: copies of whole matrices take more memory, and longer than the sums.
PANEL = 1024


def product(
    A: Tensor, B: Tensor, alpha: float, *addends: Addend, dtype: Optional[torch.dtype] = None
) -> tuple[Tensor, Tensor]:
    """Return alpha A B + Σ beta D in float64, and the largest rounding error that each entry may have.

    A sum of k products in float32, in any order, has an error of at most k roundings of the sum of the products'
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). alpha, the product with it and
    each addend (beta, D) add a rounding, and the result is rounded to its dtype: A's, if none is given.
    """
    exact, sizes = _in_panels(A, B)
    exact, sizes = alpha * exact, abs(alpha) * sizes
    for beta, D in addends:
        exact, sizes = exact + beta * D.double(), sizes + abs(beta) * D.double().abs()
    summing = _summing(A.size(-1), addends) * sizes
    return exact, summing + rounding_error(exact.abs() + summing, dtype or A.dtype)


def sums_of_product(
    A: Tensor, B: Tensor, alpha: float, addends: Sequence[Addend], signs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `sums_of_neighbours` of alpha A B + Σ beta D, and by how much roundings in float32 may move them.

    No entry of A B is computed, so this takes the time of two products with as many columns as there are groups.
    """
    exact, sizes = _in_panels(A, *sums_of_neighbours(B, signs))
    exact, sizes = alpha * exact, abs(alpha) * sizes
    for beta, D in addends:
        sums, magnitudes = sums_of_neighbours(D, signs)
        exact, sizes = exact + beta * sums, sizes + abs(beta) * magnitudes
    return exact, _summing(A.size(-1), addends) * sizes


def sums_of_neighbours(matrix: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of neighbours in each row (m, groups) in float64: with signs, and of the magnitudes.

    `signs` (groups, length) has zeros where the last group is longer than what is left of a row.
    """
    exact, magnitudes, length = [], [], signs.size(1)
    rows = torch.nn.functional.pad(matrix, (0, signs.numel() - matrix.size(1)))
    together = max(1, PANEL // length)
    for panel, panel_signs in zip(rows.split(together * length, -1), signs.split(together)):
        groups = panel.double().unflatten(-1, panel_signs.shape)
        exact.append((groups * panel_signs).sum(-1))
        magnitudes.append(groups.abs().sum(-1))
    return torch.cat(exact, -1), torch.cat(magnitudes, -1)


def _in_panels(A: Tensor, B: Tensor, magnitudes: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """Return A B and |A| |B| in float64; `magnitudes` takes the place of |B|."""
    exact, sizes = (A.new_zeros(*A.shape[:-1], B.size(-1), dtype=torch.float64) for _ in range(2))
    magnitudes = B if magnitudes is None else magnitudes
    for a, b, size in zip(A.split(PANEL, -1), B.split(PANEL, -2), magnitudes.split(PANEL, -2)):
        a = a.double()
        exact += a @ b.double()
        sizes += a.abs() @ size.double().abs()
    return exact, sizes


def _summing(k: int, addends: Sequence[Addend]) -> float:
    """Return the error of sums of k products and the addends, as a share of the sum of the magnitudes."""
    roundings = (k + 2 + len(addends)) * unit_roundoff(torch.float32)
    return roundings / (1 - roundings)


def rounding_error(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the spacing of `dtype` around `exact`, the most that rounding to nearest can change."""
    return unit_roundoff(dtype) * exact.abs().clamp_min(torch.finfo(dtype).smallest_normal)
