"""From packed momentum to the directions that parameters descend along: the one place after orthogonalization.

The matrices of this process, those of an owner and those whose Gram matrix is summed all come through `finished`. An
update rule that goes on from the polar factor belongs here. A second state of a matrix, such as the row statistics of
NorMuon, lives where momentum lives: with the holders, laid out like the parameter, so that checkpoints save and
reshard it alike. An owner keeps nothing from step to step: what it needs comes and goes with the direction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..iteration import Iteration
from ..polar import polar_factors


def polar_update(packed: Tensor, iteration: Iteration, eps: float) -> tuple[Tensor, Tensor]:
    """Return the directions of whole matrices (B, m, n) from their packed momentum, and their norms, as `finished`."""
    return finished(polar_factors(packed, iteration, eps))


def finished(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the directions (B, m, n) that polar factors, or parts of them, become, and their norms (B,).

    Norms are Frobenius norms, at least float32, and NaN for a matrix that is not finite.
    """
    dtype = torch.promote_types(factors.dtype, torch.float32)
    return factors, torch.linalg.vector_norm(factors, dim=(-2, -1), dtype=dtype)
