"""Bounds on the rounding error of a product."""

from __future__ import annotations

from typing import Sequence, Tuple

import torch
from torch import Tensor

# A number and the matrix that it multiplies in a sum.
Addend = Tuple[float, Tensor]


def product(A: Tensor, B: Tensor, alpha: float, *addends: Addend) -> tuple[Tensor, Tensor]:
    """Return alpha A B + Σ beta D in float64, and the largest rounding error that each entry may have.

    A sum of k products in float32, in any order, has an error of at most k roundings of the sum of the products'
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). alpha, the product with it and
    each addend (beta, D) add a rounding, and the result is rounded to its dtype.
    """
    dtype = A.dtype
    A, B = A.double(), B.double()
    exact, sizes = alpha * A @ B, abs(alpha) * A.abs() @ B.abs()
    for beta, D in addends:
        exact, sizes = exact + beta * D.double(), sizes + abs(beta) * D.double().abs()
    summing = _summing(A.size(-1), addends) * sizes
    return exact, summing + rounding_error(exact.abs() + summing, dtype)


def sums_of_product(
    C: Tensor, A: Tensor, B: Tensor, alpha: float, addends: Sequence[Addend], signs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (alpha A B + Σ beta D) S in float64, and the most by which rounding may move C S from it.

    S, `signs` (n, s), has entries -1, 0 and 1. No entry of A B is computed, so this takes the time of two products with
    s columns. A number that was rounded to c is at most half the spacing around c away.
    """
    exact, sizes = alpha * A.double() @ (B.double() @ signs), abs(alpha) * A.double().abs() @ _sizes(B, signs)
    for beta, D in addends:
        exact, sizes = exact + beta * D.double() @ signs, sizes + abs(beta) * _sizes(D, signs)
    return exact, _summing(A.size(-1), addends) * sizes + rounding_error(C.double(), C.dtype) @ signs.abs()


def _sizes(matrix: Tensor, signs: Tensor) -> Tensor:
    return matrix.double().abs() @ signs.abs()


def _summing(k: int, addends: Sequence[Addend]) -> float:
    """Return the error of sums of k products and the addends, as a share of the sum of the magnitudes."""
    roundings = (k + 2 + len(addends)) * torch.finfo(torch.float32).eps / 2
    return roundings / (1 - roundings)


def rounding_error(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the spacing of `dtype` around `exact`, the most that rounding to nearest can change."""
    limits = torch.finfo(dtype)
    return limits.eps / 2 * exact.abs().clamp_min(limits.smallest_normal)
