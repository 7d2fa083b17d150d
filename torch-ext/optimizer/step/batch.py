"""The update of one chain of batches of this process: momentum, orthogonalization, descent."""

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
from .polar_update import Packed, as_parameter, norms_memory_for_descent, norms_of_updates
from .recipe import Recipe, Recipes
from .workspace import LocalBatch


class UpdateNorms(NamedTuple):
    """The Frobenius norms (B,) of a batch's updates, and the step size applied to them.

    `active` says which of the matrices have a gradient on any rank, None that all have. Others have a norm of 0.
    """

    norms: Tensor
    elements: int  # of one update
    multiplier: Number
    lr: Tensor
    active: Optional[Tensor] = None


def update_local_(chains: Iterable[Sequence[LocalBatch]], recipes: Recipes) -> list[UpdateNorms]:
    """Update the matrices of this process that have a gradient, and their momentum, in place; return their norms."""
    norms, hosts = [], set()
    for chain in chains:
        present = [work.with_gradients() for work in chain]
        for work, with_gradients in zip(chain, present):
            if with_gradients is not work:
                _scale_rows_of_absent_(work, recipes)
        # Offloaded momentum comes to the device for this batch only, which is then its whole chain.
        host, chunk = chain[0].host, chain[0].host_chunk
        hosts.add(host)
        present = [work for work in present if work.parts]
        if not present:
            continue
        with nullcontext() if host is None else host.borrowed(chunk) as momenta:
            if momenta is not None:
                take_momentum(chain[0].parts, momenta)
            norms += update_chain_(present, recipes)
    # A chunk whose matrices have no gradient was fetched ahead for nothing, and its momentum in host memory may change
    # before the next step.
    for host in filter(None, hosts):
        host.forget()
    return norms


def update_chain_(chain: Sequence[LocalBatch], recipes: Recipes) -> list[UpdateNorms]:
    """Update the parameters and momentum buffers of a chain's batches in place, from its gradients."""
    chain_recipes = [recipes.of_groups(work.group_numbers, work.batch.first.parameter) for work in chain]
    packed = recipes.graphs.packed(
        [(work.batch, len(work.parts), recipe.eps) for work, recipe in zip(chain, chain_recipes)]
    )
    for work, recipe, member in zip(chain, chain_recipes, packed.members):
        _pack_(work, recipe, member)
    updates = packed.update()
    return [_descend_(*each, recipes.groups) for each in zip(chain, chain_recipes, updates)]


def _pack_(work: LocalBatch, recipe: Recipe, packed: Packed) -> None:
    """Take a batch's gradients, which are released, into its momentum, and pack its directions."""
    directions = Directions(as_parameter(work.batch, packed.directions), norms=packed.norms)
    pack_momentum_(work.momentum(), work.take_gradients(), directions, recipe.momentum, recipe.scaling)


def _descend_(work: LocalBatch, recipe: Recipe, updates: Tensor, groups: Sequence[Group]) -> UpdateNorms:
    """Move a batch's parameters by their updates, which are changed."""
    batch, parts = work.batch, work.parts
    parameters, keeps_norm = work.parameters(), batch.first.parameter.keeps_norm
    descended = norms_memory_for_descent(batch, updates)
    # Before second moments change the updates. Hyperball has norms of its own.
    norms = norms_of_updates(updates) if descended is None and not keeps_norm else descended
    if batch.moments_shape is not None:
        balance_parts_(updates, parts, recipe.second_moment_beta, recipe.scaling.found_inf)
    elements, rule = updates[0].numel(), recipe.descent._replace(multiplier=work.multiplier)
    if keeps_norm:
        moved = torch.stack(parameters)
        norms = move_on_sphere_(moved, updates, rule.lr)
        updates, rule = moved, REPLACING
    options = DescentOptions(
        row_scales(parts), seeds(parts, groups), recipe.scaling.found_inf, remainder=remainders(parts), norms=descended
    )
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
            parameter = part.matrix.parameter
            found_inf = recipes.scalings.on(parameter.sharers, parameter.device).found_inf
            scale_rows_(part.view, part.row_scale, part.remainder, [found_inf])
