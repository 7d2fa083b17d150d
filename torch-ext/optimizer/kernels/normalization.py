"""Frobenius norms of matrices and of their rows, and matrices divided by them.

Norms are float64, in which squares of narrower dtypes neither overflow nor vanish. Float64 matrices, and all where a
device has no float64 and norms are float32, are scaled before they are squared.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from .formats import exact_dtype
from .native import IS_PORTABLE, frobenius_norm_, normalize_
from .portable.norms import multiplier
from .tracing import is_transformed


def normalize(
    G: Tensor,
    work_dtype: torch.dtype,
    eps: float,
    scale: float = 1.0,
    norm: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
) -> Tensor:
    """Return scale * G / max(|G|_F, eps) for each matrix of G (..., m, n), in `work_dtype`.

    The result is written to `out` if that is given, which may be G; autograd and torch.func need new memory. If G is
    only a part of a matrix, pass the norm of the whole as `norm` (..., 1, 1), in `exact_dtype`. With `norm` (..., m, 1)
    each row is divided by its number. `normalize_` says when a matrix times a power of two gives the same bits.
    """
    norm = frobenius_norm(G) if norm is None else norm
    if native_passes_take(G, work_dtype):
        batch = as_batch(G)
        # Products on a CPU need contiguous rows. Those on a GPU take tall matrices as they are.
        order = torch.contiguous_format if G.device.type == "cpu" else torch.preserve_format
        new = out is None
        normalized = torch.empty_like(batch, dtype=work_dtype, memory_format=order) if new else out.view(batch.shape)
        normalize_(normalized, batch, norm.reshape(-1 if norm.size(-2) == 1 else batch.shape[:2]), eps, scale)
        return normalized.view(G.shape) if new else out
    exact = torch.promote_types(torch.promote_types(G.dtype, work_dtype), torch.float32)
    by = multiplier(norm, eps, scale, exact)
    return (G * by).to(work_dtype) if out is None else torch.mul(G, by, out=out)


def frobenius_norm(X: Tensor) -> Tensor:
    """Return the Frobenius norms (..., 1, 1) of X (..., m, n), in `exact_dtype` of its device.

    A norm that float32 cannot hold is infinite there.
    """
    exact = exact_dtype(X.device)
    if native_passes_take(X):
        norms = X.new_empty(*X.shape[:-2], 1, 1, dtype=exact)
        frobenius_norm_(norms.view(-1), as_batch(X))
        return norms
    if exact == torch.float64 and X.dtype != exact:  # squares of narrower dtypes neither overflow nor vanish in float64
        rows = torch.linalg.vector_norm(X, dim=-1, keepdim=True, dtype=torch.float64)
        return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    if not X.numel():  # a rank's part of a matrix, perhaps; `amax` has no result for it
        return X.new_zeros(*X.shape[:-2], 1, 1, dtype=exact)
    X = X.to(exact)
    peak = X.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    return peak * torch.linalg.vector_norm(X / peak, dim=(-2, -1), keepdim=True)


def row_norms(X: Tensor) -> Tensor:
    """Return the norms (..., m, 1) of the rows of X (..., m, n), in `exact_dtype` of its device.

    Each has the bits of the Frobenius norm that the row has as a matrix.
    """
    if native_passes_take(X):
        batch = as_batch(X)
        norms = X.new_empty(batch.shape[:2], dtype=exact_dtype(X.device))
        frobenius_norm_(norms, batch)
        return norms.view(*X.shape[:-1], 1)
    return frobenius_norm(X.unsqueeze(-2)).squeeze(-1)


def native_passes_take(X: Tensor, *others: torch.dtype) -> bool:
    """Whether the native passes take X, with results in X's dtype and in those of `others`.

    They support neither gradients nor torch.func.
    """
    return has_native_passes(X.device, X.dtype, *others) and not is_transformed(X)


def has_native_passes(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether there are native passes on `device` for matrices and results in these dtypes; float64 has none."""
    return (IS_PORTABLE or device.type in ("cpu", "cuda")) and torch.float64 not in dtypes


def as_batch(X: Tensor) -> Tensor:
    """Return X (..., m, n), one matrix or a batch, as (B, m, n)."""
    return X.reshape(math.prod(X.shape[:-2]), *X.shape[-2:])
