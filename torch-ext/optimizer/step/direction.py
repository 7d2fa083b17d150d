"""From packed momentum to the directions that parameters descend along: the one place after orthogonalization.

The matrices of this process, those of an owner and those whose Gram matrix is summed all come through `finished`. An
update rule that goes on from the polar factor belongs here. A second state of a matrix, such as the row statistics of
NorMuon, lives where momentum lives: with the holders, laid out like the parameter, so that checkpoints save and
reshard it alike. An owner keeps nothing from step to step: what it needs comes and goes with the direction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..iteration import Iteration
from ..polar import polar_factors


class Directions(NamedTuple):
    """Directions (B, m, n), and their Frobenius norms (B,), at least float32: NaN for one that is not finite."""

    packed: Tensor
    norms: Tensor


def polar_update(packed: Tensor, iteration: Iteration, eps: float) -> Directions:
    """Return the directions of whole matrices (B, m, n), from their packed momentum."""
    return finished(polar_factors(packed, iteration, eps))


def finished(factors: Tensor) -> Directions:
    """Return the directions that polar factors (B, m, n), or parts of them, become."""
    dtype = torch.promote_types(factors.dtype, torch.float32)
    return Directions(factors, torch.linalg.vector_norm(factors, dim=(-2, -1), dtype=dtype))
