"""The product of a matrix and its transpose, for callers from outside: checked, and by the fastest kernel."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .autocast import without_autocast
from .formats import is_dtensor, shown
from .normalization import as_batch
from .products import symmetric_choice, symmetric_product
from .tracing import is_transformed


def matmul_transpose(X: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Return X Xᵀ (..., m, m) of X (..., m, k) in X's dtype, written to `out` if that is given.

    `out` has the result's shape, and X's dtype and device; it may have any strides. X is not changed. The result is bit
    for bit symmetric if the symmetric kernel runs. Elsewhere, and if a gradient is needed, it comes from torch's
    product and is only as symmetric as that. Raises TypeError for a DTensor, and unless X and a given `out` are
    tensors. Raises ValueError for fewer than two dimensions, for a sparse tensor, for a dtype that is not floating
    point, and for an `out` that does not fit or shares X's storage.
    """
    if not isinstance(X, Tensor):
        raise TypeError(f"matmul_transpose needs a tensor, got {type(X).__name__}: write torch.as_tensor(...)")
    if is_dtensor(X):
        raise TypeError("matmul_transpose needs a whole matrix, got a DTensor: write X.full_tensor()")
    if X.ndim < 2 or not X.is_floating_point() or X.layout != torch.strided:
        raise ValueError(f"matmul_transpose needs dense real floating-point X (..., m, k), got {shown(X)}")
    if out is not None:
        _check_result(out, X)
    if is_transformed(X) or (symmetric_choice(X.device, X.dtype, *X.shape[-2:]).gain or 0) < 1:
        with without_autocast(X.device.type):
            return torch.matmul(X, X.mT, out=out)
    batch = as_batch(X)
    if out is not None and out.is_contiguous():
        symmetric_product(batch, batch.mT, out=out.view(len(batch), X.size(-2), X.size(-2)))
        return out
    product = symmetric_product(batch, batch.mT).reshape(*X.shape[:-1], X.size(-2))
    return product if out is None else out.copy_(product)


def _check_result(out: Any, X: Tensor) -> None:
    if not isinstance(out, Tensor) or is_dtensor(out):
        raise TypeError(f"out must be a plain tensor or None, got {type(out).__name__}")
    shape = (*X.shape[:-1], X.size(-2))
    if (tuple(out.shape), out.dtype, out.device, out.layout) != (shape, X.dtype, X.device, X.layout):
        raise ValueError(f"out must be {shape} {X.dtype} on {X.device}, got {shown(out)} on {out.device}")
    if torch._C._is_alias_of(out, X):
        raise ValueError("out must not share its storage with X, which is still read while out is written")
