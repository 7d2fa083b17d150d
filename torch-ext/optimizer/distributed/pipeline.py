"""One batch's way through the step: momentum and packing, orthogonalization, descent."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from ..polar import polar_factors
from ..rules.descent import DescentRule, descend_packed_
from ..rules.momentum import MomentumRule, pack_momentum_
from .plan import Batch


class Recipe(NamedTuple):
    """What a group's step does to each of its matrices, before and after they are orthogonalized."""

    momentum: MomentumRule
    eps: float
    descent: DescentRule


def update_batch_(
    batch: Batch, parameters: Sequence[Tensor], buffers: Sequence[Tensor], multiplier: float, recipe: Recipe
) -> None:
    """Update the matrices of one batch and their momentum buffers in place, from the gradients in `.grad`."""
    shape = (batch.cols, batch.rows) if batch.turned else (batch.rows, batch.cols)
    packed = torch.empty(len(parameters), *shape, dtype=batch.packed_dtype, device=parameters[0].device)
    pack_momentum_(buffers, [p.grad for p in parameters], packed.mT if batch.turned else packed, recipe.momentum)
    factors = polar_factors(packed, batch.iteration, recipe.eps)
    descend_packed_(parameters, factors.mT if batch.turned else factors, multiplier, recipe.descent)
