"""`frobenius_norm_` and `normalize_` in torch's functions; their contract is in `kernels/native.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import HALVES
from .memory import Memory
from .refusals import listed, name_of, place

NORM_SCHEMA = "(Tensor(a!) norms, Tensor X) -> ()"
NORMALIZE_SCHEMA = "(Tensor(a!) out, Tensor X, Tensor norms, float eps, float scale) -> ()"

# Into so many parts a matrix is cut whose squares are added to one another first: it takes as many times less memory.
_PARTS = 16


def frobenius_norm_(norms: Tensor, X: Tensor) -> None:
    """Write the Frobenius norm of each matrix of X (B, m, n) to `norms` (B)."""
    _check_batch("X", X, X)
    _check_norms(norms, X)
    memory = Memory()
    memory.write("norms", norms)
    memory.read("X", X)
    memory.check()
    norms.copy_(_sum_of_squares(X).sqrt_())


def normalize_(out: Tensor, X: Tensor, norms: Tensor, eps: float, scale: float) -> None:
    """Write scale X / max(norms, eps) to `out`, both (B, m, n)."""
    _check_batch("X", X, X)
    _check_batch("out", out, X)
    _check_norms(norms, X)
    if not eps >= 0:
        raise RuntimeError(f"eps must be at least 0, got {eps:g}")
    memory = Memory()
    memory.write("out", out)
    memory.read("X", X)
    memory.read("norms", norms)
    memory.check()
    out.copy_(X * multiplier(norms.view(-1, 1, 1), eps, scale, torch.float32))


def multiplier(norm: Tensor, eps: float, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale / max(norm, eps) in `dtype`: what matrices with these norms are multiplied by.

    It is finite, so that zeros stay zeros. A norm below the smallest normal number has no digits left that could be
    scaled up.
    """
    limits = torch.finfo(dtype)
    return (scale / norm.clamp_min(max(eps, limits.tiny))).clamp_max(limits.max).to(dtype)


def _sum_of_squares(X: Tensor) -> Tensor:
    """Return the sum (B) of squares of each matrix of X (B, m, n), in float64.

    The order of the sum follows from m and n alone, so it is written out: torch may cut a sum by its number of threads.
    """
    flat = X.reshape(len(X), X.size(1) * X.size(2))
    length = max(1, -(-flat.size(1) // _PARTS))
    sums = torch.zeros(len(X), length, dtype=torch.float64, device=X.device)
    for part in flat.split(length, 1):
        sums[:, : part.size(1)] += part.double().square_()
    while sums.size(1) > 1:
        half = -(-sums.size(1) // 2)
        sums[:, : sums.size(1) - half] += sums[:, half:]
        sums = sums[:, :half]
    return sums[:, 0]


def _check_batch(name: str, t: Tensor, X: Tensor) -> None:
    if t.device != X.device:
        raise RuntimeError(f"{name} must be on {place(X)} like X, got {place(t)}")
    if t.dtype not in (torch.float32, *HALVES):
        raise RuntimeError(f"{name} must be float32, float16 or bfloat16, got {name_of(t.dtype)}")
    if t.ndim != 3:
        raise RuntimeError(f"{name} must be (batch, rows, cols), got {listed(t.shape)}")
    if t.shape != X.shape:
        raise RuntimeError(f"{name} must have the shape {listed(X.shape)} of X, got {listed(t.shape)}")


def _check_norms(norms: Tensor, X: Tensor) -> None:
    if norms.device != X.device or norms.dtype != torch.float64:
        given = f"{name_of(norms.dtype)} on {place(norms)}"
        raise RuntimeError(f"norms must be float64 on {place(X)}, got {given}")
    if norms.shape != X.shape[:1] or not norms.is_contiguous():
        raise RuntimeError(f"norms must be ({len(X)}), contiguous, got {listed(norms.shape)}")
