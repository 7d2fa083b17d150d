"""One batch's way through the step: momentum and packing, orthogonalization, descent."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..parameters import GradientScaling
from ..polar import polar_factors
from ..rules.descent import DescentRule, descend_packed_
from ..rules.momentum import MomentumRule, pack_momentum_
from .plan import Batch


class Part(NamedTuple):
    """One matrix of a batch: views of its parameter, momentum buffer and gradient, rows x cols."""

    parameter: Tensor
    buffer: Tensor
    gradient: Tensor
    row_scale: Optional[Tensor] = None  # float32, an entry per row
    seed: Optional[int] = None  # with which the parameter is rounded stochastically


class Recipe(NamedTuple):
    """What a step does to the matrices of a batch, before and after they are orthogonalized."""

    momentum: MomentumRule
    eps: float
    descent: DescentRule
    scaling: GradientScaling


def update_batch_(batch: Batch, parts: Sequence[Part], recipe: Recipe) -> Tensor:
    """Update the parameters and momentum buffers of one batch in place, from its gradients.

    Returns the Frobenius norms (B,) of the polar factors, float32: those of matrices that are not finite are NaN.
    """
    parameters = [part.parameter for part in parts]
    shape = (batch.cols, batch.rows) if batch.turned else (batch.rows, batch.cols)
    packed = torch.empty(len(parts), *shape, dtype=batch.packed_dtype, device=parameters[0].device)
    buffers, gradients = [part.buffer for part in parts], [part.gradient for part in parts]
    pack_momentum_(buffers, gradients, packed.mT if batch.turned else packed, recipe.momentum, recipe.scaling)
    factors = polar_factors(packed, batch.iteration, recipe.eps)
    descend_packed_(
        parameters,
        factors.mT if batch.turned else factors,
        batch.multiplier,
        recipe.descent,
        row_scale=_row_scales(batch, parts),
        seeds=_seeds(parts),
        found_inf=recipe.scaling.found_inf,
    )
    return torch.linalg.vector_norm(factors, dim=(-2, -1), dtype=torch.promote_types(factors.dtype, torch.float32))


def _row_scales(batch: Batch, parts: Sequence[Part]) -> Optional[Tensor]:
    """Return an entry for each row of all parts, 1 for those that are not scaled; None where none is."""
    given = [part.row_scale for part in parts if part.row_scale is not None]
    if not given:
        return None
    ones = given[0].new_ones(batch.rows)
    return torch.cat([ones if part.row_scale is None else part.row_scale for part in parts])


def _seeds(parts: Sequence[Part]) -> Optional[Tensor]:
    if parts[0].seed is None:
        return None
    return torch.tensor([part.seed for part in parts], dtype=torch.int64, device="cpu")
