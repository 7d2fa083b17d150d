"""The products a Newton-Schulz iteration is made of, as one value: another backend is another table, not a branch."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from .tuned import nearest

try:
    from . import symmetric_gemm
except ImportError:  # builds of torch for CPUs bring no triton
    symmetric_gemm = None


class Gemms(NamedTuple):
    """Three products over wide matrices X (..., m, n) and symmetric A, B (..., m, m); each returns a new tensor."""

    gram: Callable[[Tensor], Tensor]  # X -> X Xᵀ
    gram_affine: Callable[[Tensor, float, float], Tensor]  # A, b, c -> b A + c A²
    affine: Callable[[Tensor, Tensor, float], Tensor]  # B, X, a -> a X + B X
    name: str


SINGLE = Gemms(
    gram=lambda X: torch.mm(X, X.mT),
    gram_affine=lambda A, b, c: torch.addmm(A, A, A, beta=b, alpha=c),
    affine=lambda B, X, a: torch.addmm(X, B, X, beta=a),
    name="torch.mm",
)
BATCHED = Gemms(
    gram=lambda X: torch.bmm(X, X.mT),
    gram_affine=lambda A, b, c: torch.baddbmm(A, A, A, beta=b, alpha=c),
    affine=lambda B, X, a: torch.baddbmm(X, B, X, beta=a),
    name="torch.bmm",
)
SYMMETRIC = BATCHED._replace(
    gram=lambda X: symmetric_gemm.symmetric_gemm(X, X.mT),
    gram_affine=lambda A, b, c: symmetric_gemm.symmetric_gemm(A, A, A, alpha=c, beta=b),
    name="symmetric_gemm",
)


def select_gemms(device: torch.device, dtype: torch.dtype, m: int, n: int) -> Gemms:
    """Return the table for wide m x n matrices: `SINGLE` for one matrix (m, n) at a time, the others for (B, m, n).

    The libraries behind torch's products on CPUs split the sum over k by how many matrices there are, so that a
    matrix would get other bits in a batch than alone; one at a time it cannot. The symmetric kernel is taken where it
    was measured to be faster on this device; where nothing was measured, torch's product is.
    """
    if device.type == "cpu":
        return SINGLE
    return SYMMETRIC if symmetric_is_faster(device, dtype, m, n) else BATCHED


def symmetric_is_faster(device: torch.device, dtype: torch.dtype, m: int, k: int) -> bool:
    """Whether the measurement nearest to m x k on this device has the symmetric kernel ahead of torch's product."""
    if symmetric_gemm is None or device.type != "cuda":
        return False
    entry = nearest(torch.cuda.get_device_name(device), dtype, m, k)
    return entry is not None and entry["gain"] >= 1


def matmul_transpose(X: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Return X Xᵀ (..., m, m) of X (..., m, k), of X's dtype, written to `out` where that is given.

    Bit for bit symmetric where the symmetric kernel runs; elsewhere as symmetric as torch's product. Raises ValueError
    for fewer than two dimensions, dtypes that are not floating point, or an `out` that does not fit or shares X's
    memory.
    """
    if X.ndim < 2 or not X.is_floating_point():
        raise ValueError(f"matmul_transpose needs real floating-point X (..., m, k), got {tuple(X.shape)} {X.dtype}")
    if out is not None:
        _check_result(out, X)
    if not symmetric_is_faster(X.device, X.dtype, *X.shape[-2:]):
        return torch.matmul(X, X.mT, out=out)
    batch = X.reshape(-1, *X.shape[-2:])
    product = symmetric_gemm.symmetric_gemm(batch, batch.mT).reshape(*X.shape[:-1], X.size(-2))
    return product if out is None else out.copy_(product)


def _check_result(out: Tensor, X: Tensor) -> None:
    shape = (*X.shape[:-1], X.size(-2))
    if (tuple(out.shape), out.dtype, out.device) != (shape, X.dtype, X.device):
        raise ValueError(
            f"out must be {shape} {X.dtype} on {X.device}, got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if torch._C._is_alias_of(out, X):
        raise ValueError("out must not share memory with X, which is still read while out is written")
