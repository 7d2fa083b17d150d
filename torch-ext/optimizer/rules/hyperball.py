"""Hyperball: a step along a sphere, after which a matrix has the same Frobenius norm as before."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.normalization import frobenius_norm
from .descent import DescentRule, as_tensor, descend_packed_


def replacing() -> DescentRule:
    """Return the rule that replaces a parameter by the update, with the pass of other descents.

    That is parameter <- 0 * parameter - 1 * -1 * update. The numbers are new ones, because a FakeTensorMode takes none
    that was made outside of it.
    """
    return DescentRule(as_tensor(1.0), as_tensor(1.0), "independent", as_tensor(-1.0))


def move_on_sphere_(W: Tensor, updates: Tensor, lr: Tensor) -> Tensor:
    """Move matrices W (B, rows, cols), float32 or float64, by updates U of their shape, in place; return norms (B,).

    W becomes R normalized(W - lr R normalized(U)), where R is W's Frobenius norm before the step. So `lr` (1 or B
    elements) is the length of a step relative to W. A zero matrix, and one with a zero update, do not change. The
    returned norms are those of R normalized(U), in `exact_dtype`: R, but 0 if W or U is zero, and NaN if either is not
    finite. A float32 W becomes NaN if lr |W| / |U| exceeds 3.4e38, the largest float32 number.
    Source: Wen et al., Hyperball (2025), as in NVIDIA's Emerging-Optimizers; R is the norm before the step.
    """
    radii, lengths = frobenius_norm(W), frobenius_norm(updates)
    step = _quotient(radii, lengths, 0.0)
    descend_packed_(W.unbind(), updates, DescentRule(lr, as_tensor(0.0), multiplier=step.flatten()))
    W *= _quotient(radii, frobenius_norm(W), 1.0).to(W.dtype)
    return (step * lengths).flatten()


def _quotient(a: Tensor, b: Tensor, otherwise: float) -> Tensor:
    """Return a / b, or `otherwise` where b is 0."""
    return torch.where(b == 0, otherwise, a / b)
