"""Bounds on the rounding error of a product."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def product(A: Tensor, B: Tensor, D: Optional[Tensor], alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """Return alpha A B + beta D in float64, and the largest rounding error that each entry may have.

    A sum of k products in float32, in any order, has an error of at most k roundings of the sum of the products'
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Coefficients, their products and
    the sum with D add three roundings, and the result is rounded to its dtype.
    """
    dtype = A.dtype
    A, B = A.double(), B.double()
    exact, sizes = alpha * A @ B, abs(alpha) * A.abs() @ B.abs()
    if D is not None:
        exact, sizes = exact + beta * D.double(), sizes + abs(beta) * D.double().abs()
    summing = _summing(A.size(-1)) * sizes
    return exact, summing + rounding_error(exact.abs() + summing, dtype)


def sums_of_product(
    C: Tensor, A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple[float, float], signs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (alpha A B + beta D) S in float64, and the most by which rounding may move C S from it.

    S, `signs` (n, s), has entries -1, 0 and 1. No entry of A B is computed, so this takes the time of two products with
    s columns. A number that was rounded to c is at most half the spacing around c away.
    """
    alpha, beta = scalars
    exact, sizes = alpha * A.double() @ (B.double() @ signs), abs(alpha) * A.double().abs() @ _sizes(B, signs)
    if D is not None:
        exact, sizes = exact + beta * D.double() @ signs, sizes + abs(beta) * _sizes(D, signs)
    return exact, _summing(A.size(-1)) * sizes + rounding_error(C.double(), C.dtype) @ signs.abs()


def _sizes(matrix: Tensor, signs: Tensor) -> Tensor:
    return matrix.double().abs() @ signs.abs()


def _summing(k: int) -> float:
    """Return the error of sums of k products, as a share of the sum of the magnitudes."""
    roundings = (k + 3) * torch.finfo(torch.float32).eps / 2
    return roundings / (1 - roundings)


def rounding_error(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the spacing of `dtype` around `exact`, the most that rounding to nearest can change."""
    limits = torch.finfo(dtype)
    return limits.eps / 2 * exact.abs().clamp_min(limits.smallest_normal)
