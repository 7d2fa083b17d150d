"""The update of one batch of this process: momentum, orthogonalization, descent."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Iterable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.settings import Group
from ..rules.descent import DescentOptions, Number, descend_packed_, scale_rows_
from ..rules.hyperball import REPLACING, move_on_sphere_
from ..rules.momentum import Directions, pack_momentum_
from .local_matrix import LocalMatrix, take_momentum
from .moments import balance_parts_
from .polar_update import as_parameter, descended_norms, norms_of_updates
from .recipe import Recipes
from .workspace import LocalBatch


class UpdateNorms(NamedTuple):
    """The Frobenius norms (B,) of a batch's updates, their number of elements, and the step size applied to them."""

    norms: Tensor
    elements: int
    multiplier: Number
    lr: Tensor


def update_local_(batches: Iterable[LocalBatch], recipes: Recipes) -> list[UpdateNorms]:
    """Update the matrices of this process that have a gradient, and their momentum, in place; return their norms."""
    norms = []
    for work in batches:
        present = work.with_gradients()
        if present is not work:
            _scale_rows_of_absent_(work, recipes)
        if not present.parts:
            continue
        with nullcontext() if work.host is None else work.host.borrowed(work.host_chunk) as momenta:
            if momenta is not None:  # borrowed copies on the device, for this batch only
                take_momentum(work.parts, momenta)
            norms.append(update_batch_(present, recipes))
    return norms


def update_batch_(work: LocalBatch, recipes: Recipes) -> UpdateNorms:
    """Update the parameters and momentum buffers of one batch in place, from its gradients."""
    batch, parts = work.batch, work.parts
    recipe = recipes.of_groups(work.group_numbers, batch.matrices[0].parameter.sharers)
    parameters, momenta, gradients = work.tensors()
    packed = recipes.graphs.packed(batch, len(parts), recipe.eps)
    directions = Directions(as_parameter(batch, packed.directions), norms=packed.norms)
    pack_momentum_(momenta, gradients, directions, recipe.momentum, recipe.scaling)
    del gradients  # these may be the last references to their memory
    updates = packed.update()
    descended, keeps_norm = descended_norms(batch, updates), batch.matrices[0].parameter.keeps_norm
    # Before second moments change the updates. Hyperball has norms of its own.
    norms = norms_of_updates(updates) if descended is None and not keeps_norm else descended
    if batch.moments_shape is not None:
        balance_parts_(updates, parts, recipe.second_moment_beta, recipe.scaling.found_inf)
    elements, rule = updates.numel(), recipe.descent.times(work.multiplier)
    if keeps_norm:
        moved = torch.stack(parameters)
        norms = move_on_sphere_(moved, updates, rule.lr)
        updates, rule = moved, REPLACING
    scales, rounding, found_inf = row_scales(parts), seeds(parts, recipes.groups), recipe.scaling.found_inf
    options = DescentOptions(scales, rounding, found_inf, remainder=remainders(parts), norms=descended)
    descend_packed_(parameters, updates, rule, options)
    return UpdateNorms(norms, elements, work.multiplier, recipe.descent.lr)


def row_scales(parts: Sequence[LocalMatrix]) -> Optional[Tensor]:
    """Return QK-clip's factor for each row of all parts, 1 for rows without scaling; None if no part is scaled."""
    scaled = parts[0].tensors.row_scales
    if not scaled or not any(part.place in scaled for part in parts):
        return None
    scales = [part.row_scale for part in parts]
    ones = next(scale for scale in scales if scale is not None).new_ones(1)
    return torch.cat([ones.expand(len(p.view)) if scale is None else scale for p, scale in zip(parts, scales)])


def remainders(parts: Sequence[LocalMatrix]) -> Optional[list[Tensor]]:
    """Return the lower half of each part's float32 value; None if the parts, which are all alike, have none."""
    return None if parts[0].remainder is None else [part.remainder for part in parts]


def seeds(parts: Sequence[LocalMatrix], groups: Sequence[Group]) -> Optional[Tensor]:
    """Return the seed of each part; None if nothing is rounded stochastically."""
    numbers = None if parts[0].origin is None else [part.seed(groups) for part in parts]
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _scale_rows_of_absent_(work: LocalBatch, recipes: Recipes) -> None:
    """Apply QK-clip to weights without a gradient, which are not updated otherwise."""
    for part in work.parts:
        if part.row_scale is not None and not part.source.has_gradient:
            found_inf = recipes.scalings[part.matrix.parameter.sharers].found_inf
            scale_rows_(part.view, part.row_scale, part.remainder, [found_inf])
