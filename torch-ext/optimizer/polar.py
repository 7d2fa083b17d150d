"""Orthogonalization: the approximate polar factor of a matrix by odd polynomials, matrix products only."""

from __future__ import annotations

from typing import Optional, Sequence, Union

import torch
from torch import Tensor

from .kernels.gemms import SINGLE, Gemms, select_gemms
from .parameters import DTYPES
from .schedules import Schedule, resolve_schedule

# bfloat16 only where the processor has instructions for its products: elsewhere each would be widened first.
_CPU_WORK_DTYPE = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def orthogonalize(
    G: Tensor,
    ns_coefficients: Union[str, Sequence] = "polar_express",
    ns_steps: int = 5,
    *,
    dtype: Optional[torch.dtype] = None,
    eps: float = 1e-7,
) -> Tensor:
    """Return p(G / max(|G|_F, eps)), the approximate polar factor U Vᵀ of each matrix G = U diag(sigma) Vᵀ.

    G is (..., m, n), floating point, and left untouched; the result has its shape and dtype. p composes the steps of
    the schedule (`resolve_schedule`) and acts on the singular values alone: those of G / |G|_F within the schedule's
    interval end in its band, smaller ones below it, zero stays zero. Rounding in the work `dtype` is amplified by up
    to the product of the first coefficients. `dtype` None is `default_work_dtype(G)`.

    The norm never overflows, a zero matrix gives zeros even with `eps` 0, and a NaN stays in its own matrix. On a CPU
    a matrix gets the same bits alone and in any batch.

    Raises ValueError for fewer than two dimensions, dtypes that are not floating point, negative eps or an invalid
    schedule. Source: Jordan, Muon (2024); Amsel et al., The Polar Express, arXiv:2505.16932.
    """
    if G.ndim < 2 or not G.is_floating_point():
        raise ValueError(f"orthogonalize needs real floating-point matrices (..., m, n), got {_shown(G)}")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    schedule = resolve_schedule(ns_coefficients, ns_steps)
    work_dtype = check_work_dtype(dtype) or default_work_dtype(G)
    if G.numel() == 0:
        return torch.zeros_like(G)
    gemms = select_gemms(G.device, work_dtype, min(G.shape[-2:]), max(G.shape[-2:]))
    factors = polar_factors(G.reshape(-1, *G.shape[-2:]), schedule, work_dtype, eps, gemms)
    return factors.to(G.dtype).reshape(G.shape)


def polar_factors(G: Tensor, schedule: Schedule, work_dtype: torch.dtype, eps: float, gemms: Gemms) -> Tensor:
    """Return what `orthogonalize` does for a batch G (B, m, n), in `work_dtype` and without checks; B is at least 1."""
    if gemms is not SINGLE:
        return _polar_factor(G, schedule, work_dtype, eps, gemms)
    factors = [_polar_factor(X, schedule, work_dtype, eps, gemms) for X in G]
    return torch.stack(factors) if len(factors) > 1 else factors[0].unsqueeze(0)


def default_work_dtype(G: Tensor) -> torch.dtype:
    """Return the dtype of the products for matrices like G.

    float64 matrices keep theirs; others work in float16 on CUDA devices (three more bits than bfloat16, whose range
    normalised matrices do not need), in bfloat16 on CPUs that multiply it natively, in float32 elsewhere.
    """
    if G.dtype == torch.float64:
        return torch.float64
    return {"cuda": torch.float16, "cpu": _CPU_WORK_DTYPE}.get(G.device.type, torch.float32)


def check_work_dtype(dtype: Optional[torch.dtype]) -> Optional[torch.dtype]:
    """Return `dtype`; ValueError if products cannot be worked in it."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"the work dtype must be one of {', '.join(map(str, DTYPES))} or None, got {dtype}")
    return dtype


def _polar_factor(G: Tensor, schedule: Schedule, work_dtype: torch.dtype, eps: float, gemms: Gemms) -> Tensor:
    """Return the polar factors of G (..., m, n) in `work_dtype`; the iteration sees wide, contiguous matrices."""
    tall = G.size(-2) > G.size(-1)
    X = normalize(G.mT if tall else G, work_dtype, eps)
    X = newton_schulz(X, schedule, gemms)
    return X.mT if tall else X


def newton_schulz(X: Tensor, schedule: Schedule, gemms: Gemms) -> Tensor:
    """Return p(X) for wide X (..., m, n) of spectral norm at most 1: every step is a X + b (X Xᵀ) X + c (X Xᵀ)² X."""
    for a, b, c in schedule:
        A = gemms.gram(X)  # X Xᵀ
        B = gemms.gram_affine(A, b, c)  # b A + c A²
        X = gemms.affine(B, X, a)  # a X + B X
    return X


def normalize(G: Tensor, work_dtype: torch.dtype, eps: float) -> Tensor:
    """Return G / max(|G|_F, eps) for each matrix of G (..., m, n), contiguous, in `work_dtype`.

    A matrix times a power of two gives the same bits, as long as its norm and the inverse of it are normal numbers.
    """
    exact = torch.promote_types(torch.promote_types(G.dtype, work_dtype), torch.float32)
    # Smaller norms than the smallest normal number have no digits left to scale up.
    inverse = 1 / frobenius_norm(G).clamp_min(max(eps, torch.finfo(exact).tiny))
    return (G * inverse.to(exact)).to(work_dtype, memory_format=torch.contiguous_format)


def frobenius_norm(X: Tensor) -> Tensor:
    """Return the Frobenius norms (..., 1, 1) of X (..., m, n), in float64."""
    if X.dtype != torch.float64:  # its squares fit into float64 whatever they are
        rows = torch.linalg.vector_norm(X, dim=-1, keepdim=True, dtype=torch.float64)
        return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    peak = X.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    return peak * torch.linalg.vector_norm(X / peak, dim=(-2, -1), keepdim=True)


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
