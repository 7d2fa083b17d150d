"""The products a Newton-Schulz iteration is made of, as one value: another backend is another table, not a branch."""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor


class Gemms(NamedTuple):
    """Three products over wide matrices X (..., m, n) and symmetric A, B (..., m, m); each returns a new tensor."""

    gram: Callable[[Tensor], Tensor]  # X -> X Xᵀ
    gram_affine: Callable[[Tensor, float, float], Tensor]  # A, b, c -> b A + c A²
    affine: Callable[[Tensor, Tensor, float], Tensor]  # B, X, a -> a X + B X
    name: str


BATCHED = Gemms(
    gram=lambda X: torch.bmm(X, X.mT),
    gram_affine=lambda A, b, c: torch.baddbmm(A, A, A, beta=b, alpha=c),
    affine=lambda B, X, a: torch.baddbmm(X, B, X, beta=a),
    name="torch.bmm",
)
SINGLE = Gemms(
    gram=lambda X: torch.mm(X, X.mT),
    gram_affine=lambda A, b, c: torch.addmm(A, A, A, beta=b, alpha=c),
    affine=lambda B, X, a: torch.addmm(X, B, X, beta=a),
    name="torch.mm",
)


def select_gemms(device: torch.device) -> Gemms:
    """Return the table for tensors on `device`: `SINGLE` for matrices (m, n), `BATCHED` for batches (B, m, n).

    The libraries behind torch's products on CPUs split the sum over k by how many matrices there are, so that a
    matrix would get other bits in a batch than alone; one at a time it cannot.
    """
    return SINGLE if device.type == "cpu" else BATCHED
