"""torch's product that is not symmetric, a X + B X, of one matrix or of a batch; and a I, added to a square."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .memory_parts import CACHE_LINE


def single_affine(B: Tensor, X: Tensor, a: float, out: Optional[Tensor] = None) -> Tensor:
    """Return a X + B X of X (m, n), in `out` if that is given."""
    if out is not None and _begins_in_a_line(out):
        return out.copy_(single_affine(B, X, a))
    return torch.addmm(X, B, X, beta=a, out=out) if a else torch.mm(B, X, out=out)


def one_by_one_affine(B: Tensor, X: Tensor, a: float, out: Optional[Tensor] = None) -> Tensor:
    """Return a X + B X of X (b, m, n), with the bits that each matrix has alone, in `out` if that is given."""
    out = torch.empty_like(X) if out is None else out
    for *operands, place in zip(B, X, out):
        b, x = (each.clone() if _begins_in_a_line(each) else each for each in operands)
        single_affine(b, x, a, place)
    return out


def batched_affine(B: Tensor, X: Tensor, a: float, out: Optional[Tensor] = None) -> Tensor:
    """Return a X + B X of X (b, m, n), in `out` if that is given."""
    return torch.baddbmm(X, B, X, beta=a, out=out) if a else torch.bmm(B, X, out=out)


def add_to_diagonal_(A: Tensor, a: float) -> Tensor:
    """Add `a` to each diagonal of A (..., m, m) in place, and return A."""
    if a:
        A.diagonal(dim1=-2, dim2=-1).add_(a)
    return A


def _begins_in_a_line(x: Tensor) -> bool:
    """Whether memory on the CPU begins inside a cache line: BLAS may sum such an operand in another order.

    In a batch most matrices do if their size in bytes is not a multiple of a line, such as 3 x 5 in float32. They are
    copied to memory of their own, so that they get the same bits as alone.
    """
    return type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling() and x.data_ptr() % CACHE_LINE != 0
