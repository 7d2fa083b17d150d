"""The names that users of the Motif kernel know."""

from __future__ import annotations

from torch import Tensor

from ..kernels.products import matmul_transpose


def matmul_transpose_assign(d_in: Tensor, d_out: Tensor) -> None:
    """Write `d_in` `d_in`ᵀ (..., m, m) into `d_out`, which is changed; errors are those of `matmul_transpose`."""
    matmul_transpose(d_in, out=d_out)
