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
    roundings = (A.size(-1) + 3) * torch.finfo(torch.float32).eps / 2
    summing = roundings / (1 - roundings) * sizes
    return exact, summing + rounding_error(exact.abs() + summing, dtype)


def rounding_error(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the spacing of `dtype` around `exact`, the most that rounding to nearest can change."""
    limits = torch.finfo(dtype)
    return limits.eps / 2 * exact.abs().clamp_min(limits.smallest_normal)
