"""The update of the matrices that this process has alone, chain by chain: momentum, orthogonalization, descent."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Iterable, Sequence

import torch
from torch import Tensor

from ..parameters.state import REMAINDER
from ..rules.descent import DescentOptions, scale_rows_
from ..rules.momentum import Directions, pack_momentum_
from .finish import UpdateNorms, descend_parts_, finish_updates_, norms_memory_for_descent
from .graphs import BatchToPack
from .local_matrix import ROW_SCALE, momentum_of, take_momentum_, views_of
from .moments import keep_moments_, stacked_moments
from .polar_update import Packed, as_parameter
from .recipe import Recipe, StepContext
from .workspace import LocalBatch


def update_local_(chains: Iterable[Sequence[LocalBatch]], context: StepContext) -> list[UpdateNorms]:
    """Update the matrices of this process that have a gradient, and their momentum, in place; return their norms."""
    norms, hosts = [], set()
    for chain in chains:
        present = [work.with_gradients() for work in chain]
        for work, with_gradients in zip(chain, present):
            if with_gradients is not work:
                _scale_rows_of_absent_(work, context)
        # Offloaded momentum comes to the device for this batch only, which is then its whole chain.
        host, chunk = chain[0].host, chain[0].host_chunk
        hosts.add(host)
        present = [work for work in present if work.parts]
        if not present:
            continue
        with nullcontext() if host is None else host.borrowed(chunk) as momenta:
            if momenta is not None:
                take_momentum_(chain[0].parts, momenta)
            norms += update_chain_(present, context)
    # A chunk whose matrices have no gradient was fetched ahead for nothing, and its momentum in host memory may change
    # before the next step.
    for host in filter(None, hosts):
        host.forget()
    return norms


def update_chain_(chain: Sequence[LocalBatch], context: StepContext) -> list[UpdateNorms]:
    """Update parameters and momentum of a chain's batches in place, from its gradients; return the norms of updates."""
    recipes = [context.recipe(work.recipe_key) for work in chain]
    packed = context.graphs.packed(
        [BatchToPack(work.batch, len(work.parts), recipe.eps) for work, recipe in zip(chain, recipes)]
    )
    for work, recipe, member in zip(chain, recipes, packed.members):
        _pack_(work, recipe, member)
    updates = packed.update()
    return list(map(_descend_, chain, recipes, updates))


def _pack_(work: LocalBatch, recipe: Recipe, packed: Packed) -> None:
    """Update a batch's momentum by its gradients, which are released if that is set, and pack its directions."""
    directions = Directions(as_parameter(work.batch, packed.directions), norms=packed.norms)
    pack_momentum_(momentum_of(work.parts), work.take_gradients(), directions, recipe.momentum, recipe.scaling)


def _descend_(work: LocalBatch, recipe: Recipe, updates: Tensor) -> UpdateNorms:
    """Move a batch's parameters by their updates, which change in place, too; return the norms of the updates."""
    batch, parts = work.batch, work.parts
    written = norms_memory_for_descent(batch, updates)
    moments = None if batch.moments_shape is None else stacked_moments(parts)
    weights = torch.stack(views_of(parts)) if batch.first.parameter.keeps_norm else None
    updates, norms = finish_updates_(updates, recipe, moments, weights, written)
    if moments is not None:
        keep_moments_(parts, moments, recipe.scaling.found_inf)
    descend_parts_(parts, updates, recipe, work.multiplier, DescentOptions(norms=written))
    return UpdateNorms(norms, math.prod(batch.packed_shape), work.multiplier, recipe.descent.lr)


def _scale_rows_of_absent_(work: LocalBatch, context: StepContext) -> None:
    """Apply QK-clip to weights without a gradient, which are not updated otherwise."""
    for part in work.parts:
        row_scale = part.get(ROW_SCALE)
        if row_scale is not None and not part.source.has_gradient:
            parameter = part.matrix.parameter
            found_inf = context.scalings.on(parameter.sharers, parameter.device).found_inf
            scale_rows_(part.view, row_scale, part.get(REMAINDER), [found_inf])
