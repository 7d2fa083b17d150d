"""Frobenius norms of matrices, and matrices divided by them. Norms are float64: squares neither overflow nor vanish."""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from .native import frobenius_norm_, normalize_


def normalize(
    G: Tensor, work_dtype: torch.dtype, eps: float, scale: float = 1.0, norm: Optional[Tensor] = None
) -> Tensor:
    """Return scale * G / max(|G|_F, eps) for each matrix of G (..., m, n), in `work_dtype`.

    `norm` (..., 1, 1), float64, stands for |G|_F where G is a part of a matrix. A matrix times a power of two gives the
    same bits, as long as its norm and the inverse of it are normal numbers.
    """
    exact = torch.promote_types(torch.promote_types(G.dtype, work_dtype), torch.float32)
    norm = frobenius_norm(G) if norm is None else norm
    if exact == torch.float32 and _is_compiled_for(G):
        batch = _as_batch(G)
        # The products of a CPU want rows as runs of memory, those of a GPU take tall matrices as they lie.
        as_given = torch.contiguous_format if G.device.type == "cpu" else torch.preserve_format
        normalized = torch.empty_like(batch, dtype=work_dtype, memory_format=as_given)
        normalize_(normalized, batch, norm.reshape(-1), eps, scale)
        return normalized.view(G.shape)
    # Smaller norms than the smallest normal number have no digits left to scale up.
    inverse = (scale / norm.clamp_min(max(eps, torch.finfo(exact).tiny))).clamp_max(torch.finfo(exact).max)
    return (G * inverse.to(exact)).to(work_dtype)


def frobenius_norm(X: Tensor) -> Tensor:
    """Return the Frobenius norms (..., 1, 1) of X (..., m, n), in float64."""
    if _is_compiled_for(X):
        norms = X.new_empty(*X.shape[:-2], 1, 1, dtype=torch.float64)
        frobenius_norm_(norms.view(-1), _as_batch(X))
        return norms
    if X.dtype != torch.float64:  # its squares fit into float64 whatever they are
        rows = torch.linalg.vector_norm(X, dim=-1, keepdim=True, dtype=torch.float64)
        return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    peak = X.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    return peak * torch.linalg.vector_norm(X / peak, dim=(-2, -1), keepdim=True)


def _is_compiled_for(X: Tensor) -> bool:
    """Whether the compiled passes take X: they know neither float64, nor gradients, nor `torch.vmap`."""
    wants_gradient = torch.is_grad_enabled() and X.requires_grad
    if X.device.type not in ("cpu", "cuda") or X.dtype == torch.float64 or wants_gradient:
        return False
    return torch.compiler.is_compiling() or not torch._C._functorch.is_functorch_wrapped_tensor(X)


def _as_batch(X: Tensor) -> Tensor:
    """Return X (..., m, n), one matrix or a batch, as (B, m, n)."""
    return X.reshape(math.prod(X.shape[:-2]), *X.shape[-2:])
