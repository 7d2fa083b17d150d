"""Symmetric products of one matrix on a CPU, in torch's products: of the blocks on and below the diagonal alone."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

# Rows of a block. With more the blocks on the diagonal waste more; with fewer torch's products become slow.
BLOCK = 192


def triangular_product(
    A: Tensor, B: Tensor, D: Optional[Tensor] = None, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """Return alpha A B + beta D (m, m), bit for bit symmetric, for A (m, k), B (k, m) and symmetric D (m, m).

    A B must be symmetric but for rounding. Only its lower triangle is computed, a block of rows at a time, and then
    mirrored: about half of the FLOPs. The operands may have any strides and any dtype, and are not changed.
    """
    m = A.size(0)
    C = A.new_empty(m, m)
    for start in range(0, m, BLOCK):
        stop = min(start + BLOCK, m)
        addend = A.new_zeros(()) if D is None else D[start:stop, :stop]
        rows = torch.addmm(addend, A[start:stop], B[:, :stop], beta=beta, alpha=alpha)
        left, corner = rows[:, :start], rows[:, start:].tril()
        C[start:stop, :start] = left
        C[:start, start:stop] = left.mT
        C[start:stop, start:stop] = corner + corner.tril(-1).mT
    return C
