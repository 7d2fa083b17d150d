"""A chunk's way through the step when its matrices are sharded: to their owners, through the iteration, and back."""

from __future__ import annotations

from typing import Container, Generator, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..kernels.native import move_blocks_
from ..parameters.settings import Group
from ..plan.exchanges import Chunk
from ..plan.process_groups import explaining_timeouts, group_of
from ..rules.descent import DescentOptions, Number, descend_packed_, scale_rows_
from ..rules.hyperball import REPLACING, move_on_sphere_
from ..rules.momentum import Directions, MomentumBuffers, pack_momentum_
from ..rules.second_moment import balance_
from .batch import UpdateNorms, remainders, row_scales, seeds
from .local_chunk import LocalChunk, LocalOwned
from .local_matrix import LocalMatrix, momentum_of
from .polar_update import as_parameter, equalized, norms_of_updates, packed_memory, update_of_factors
from .recipe import Recipe, Recipes
from .team import team_factor


def update_chunk_(
    work: LocalChunk, recipes: Recipes, group: dist.ProcessGroup
) -> Generator[None, None, list[UpdateNorms]]:
    """Update this rank's parts of a chunk and their momentum; yields twice, once after each started exchange.

    Matrices without a gradient on any rank are unchanged. Returns the norms of the updates of owned matrices, 0 for
    those that are left alone.
    """
    chunk, holder, owner = work.chunk, work.chunk.messages.holder, work.chunk.messages.owner
    parameter = chunk.first.parameter
    parts = ShardedParts(work.parts, recipes.of_groups(work.group_numbers, parameter), recipes.groups)
    outgoing = torch.empty(sum(holder.sent) + holder.scratch, dtype=parameter.packed_dtype, device=parameter.device)
    if work.parts:
        parts.pack_(outgoing, work.directions)
        _write_flags_(outgoing, work, parts.absent)
        if work.moments is not None:
            work.moments.send_(outgoing, work.parts)
        for number, offset in work.weights_out:
            view = work.parts[number].view
            outgoing[offset : offset + view.numel()].view_as(view).copy_(view)
    received = yield from _exchanged(chunk, outgoing, holder.sent, owner.received, group)
    del outgoing
    with record_function(chunk.profiled_as):
        returned, norms = _orthogonalized(work, received, recipes)
    del received
    updates = yield from _exchanged(chunk, returned, owner.sent, holder.received, group)
    del returned
    if work.parts:
        active_flags = updates.index_select(0, work.active_in)
        parts.descend_(updates, work.multipliers, active_flags, work.updates)
        if work.moments is not None:
            work.moments.take_(updates, work.parts, active_flags > 0, parts.found_inf)
    return norms


def _write_flags_(outgoing: Tensor, work: LocalChunk, absent: Container[int]) -> None:
    """Write into `outgoing`, for each part that is sent, 1 if there is a gradient, else 0; no device is waited for."""
    if not absent:
        outgoing.index_fill_(0, work.presence_out, 1.0)
        return
    flags = torch.tensor([float(i not in absent) for i in work.sent], dtype=outgoing.dtype, device="cpu")
    outgoing.index_copy_(0, work.presence_out, flags.to(outgoing.device, non_blocking=True))


class ShardedParts:
    """A rank's parts between pack and descent.

    A part without a gradient counts as zero if another rank has one. Whether one has is known only when the owner's
    flag comes back. Until then the momentum of such a part, an absent one, is updated in a copy.
    """

    def __init__(self, parts: Sequence[LocalMatrix], recipe: Recipe, groups: Sequence[Group]):
        self.parts = parts
        self.absent = frozenset(i for i, part in enumerate(parts) if not part.source.has_gradient)
        self._recipe, self._groups = recipe, groups
        self._momenta = MomentumBuffers(())

    @property
    def found_inf(self) -> Optional[Tensor]:
        """Above 0 if gradients overflow on some rank; then nothing changes."""
        return self._recipe.scaling.found_inf

    @record_function("muon.pack")
    def pack_(self, packed: Tensor, offsets: Optional[Sequence[int]] = None) -> None:
        """Take the gradients into the momentum buffers, and write the directions into `packed`, at `offsets` of it."""
        self._momenta = momentum_of(self.parts)
        for tensors in filter(None, self._momenta):
            for i in self.absent:
                tensors[i] = tensors[i].clone()
        gradients = [
            part.source.take_gradient(part.place) if part.source.has_gradient else torch.zeros_like(part.view)
            for part in self.parts
        ]
        directions = Directions(packed, offsets)
        pack_momentum_(self._momenta, gradients, directions, self._recipe.momentum, self._recipe.scaling)

    @record_function("muon.descend")
    def descend_(
        self, updates: Tensor, multiplier: Number, active_flags: Tensor, offsets: Optional[Sequence[int]] = None
    ) -> None:
        """Update those parts whose flag is above zero, by `updates`, at `offsets` of that buffer."""
        parts, active, overflow = self.parts, active_flags > 0, self.found_inf
        origins = None if parts[0].origin is None else [number for part in parts for number in part.origin]
        rounding = seeds(parts, self._groups)
        options = DescentOptions(row_scales(parts), rounding, overflow, active, offsets, origins, remainders(parts))
        keeps_norms = parts[0].matrix.parameter.keeps_norm
        rule = REPLACING if keeps_norms else self._recipe.descent._replace(multiplier=multiplier)
        descend_packed_([part.view for part in parts], updates, rule, options)
        for i in sorted(self.absent):
            part = parts[i]
            for kept, updated in zip(momentum_of([part]).tensors, self._momenta.tensors_of(i)):
                kept.copy_(torch.where(active[i], updated, kept))
            if part.row_scale is not None:  # QK-clip applies to weights without a gradient too
                scale_rows_(part.view, part.row_scale, part.remainder, [overflow, active[i]])


def _exchanged(
    chunk: Chunk, buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Generator[None, None, Tensor]:
    """Send the front of `buffer`, `sent` elements to each rank, and return what has come; yields while that flies."""
    front, incoming = buffer[: sum(sent)], buffer.new_empty(sum(received))
    with record_function("muon.send"), explaining_timeouts("parts", chunk.names):
        pending = dist.all_to_all_single(incoming, front, list(received), list(sent), group=group, async_op=True)
    yield
    with record_function("muon.wait"), explaining_timeouts("parts", chunk.names):
        pending.wait()
    return incoming


def _orthogonalized(work: LocalChunk, received: Tensor, recipes: Recipes) -> tuple[Tensor, list[UpdateNorms]]:
    """Return what is sent back, the blocks of the owned matrices' updates and their flags; and the updates' norms."""
    chunk, norms = work.chunk, []
    active_flags = _active_flags(work, received)
    returned = received.new_empty(sum(chunk.messages.owner.sent), dtype=chunk.first.parameter.update_dtype)
    for team, owned in work.teams:
        eps, group = recipes.of([team.matrix]).eps, group_of(team.ranks, chunk.names)
        packed = None if owned is None else packed_memory(owned.batch, 1, received.device)
        if packed is not None:
            _assemble_(owned, received, packed)
            packed = equalized(owned.batch, packed, eps)
        factor = team_factor(team, packed, eps, group)
        del packed
        if owned is not None:
            updates = update_of_factors(as_parameter(owned.batch, factor), owned.batch.equalization.after)
            norms.append(_write_updates_(returned, owned, updates, active_flags, recipes, received))
            del updates
        del factor
    for chain in work.owned:
        counts = [(owned.batch, len(owned.positions), recipes.of(owned.batch.matrices).eps) for owned in chain]
        packed = recipes.graphs.packed(counts)
        for owned, member in zip(chain, packed.members):
            _assemble_(owned, received, member.directions)
            member.take_norms_()
        updates = packed.update()
        norms += [_write_updates_(returned, *each, active_flags, recipes, received) for each in zip(chain, updates)]
        del packed, updates, member  # before the next chain is put together
    matrices, flags = work.active_out
    returned.index_copy_(0, flags, active_flags.index_select(0, matrices).to(returned.dtype))
    return returned, norms


def _write_updates_(
    returned: Tensor,
    owned: LocalOwned,
    updates: Tensor,
    active_flags: Tensor,
    recipes: Recipes,
    received: Tensor,
) -> UpdateNorms:
    """Write the blocks of a batch's updates into `returned`; return the norms of the updates.

    The updates are balanced before by the second moments in `received`, if there are any. Where norms of matrices are
    kept it is the new matrices that are written, made of those in `received`.
    """
    active, matrices = active_flags.index_select(0, owned.positions) > 0, owned.batch.matrices
    lr, keeps_norm = recipes.of(matrices).descent.lr, owned.batch.first.parameter.keeps_norm
    # Before second moments change the updates. Hyperball has norms of its own.
    norms = None if keeps_norm else norms_of_updates(updates)
    _balance_(owned, received, returned, updates, recipes)
    if keeps_norm:
        moved = received.new_empty(updates.shape)
        move_blocks_(moved, received, owned.weights_in, to_buffer=False)
        norms = move_on_sphere_(moved, updates, lr)
        updates = moved
    move_blocks_(updates, returned, owned.blocks_out, to_buffer=True)
    return UpdateNorms(norms.where(active, 0.0), updates[0].numel(), owned.batch.first.multiplier, lr, active)


def _balance_(owned: LocalOwned, received: Tensor, returned: Tensor, updates: Tensor, recipes: Recipes) -> None:
    """Balance a batch's updates, in place, by the second moments that have come, if any; write new ones to be sent."""
    batch = owned.batch
    if batch.moments_shape is None:
        return
    dtype, beta = batch.first.parameter.moments_dtype, recipes.of(batch.matrices).second_moment_beta
    moments = torch.empty(len(updates), *batch.moments_shape, dtype=dtype, device=updates.device)
    move_blocks_(moments, received.view(dtype), owned.moments_in, to_buffer=False)
    balance_(updates, moments, beta)
    move_blocks_(moments, returned.view(dtype), owned.moments_out, to_buffer=True)


def _assemble_(owned: LocalOwned, received: Tensor, packed: Tensor) -> None:
    """Write the matrices of a batch, packed, from the blocks that have come."""
    move_blocks_(as_parameter(owned.batch, packed), received, owned.blocks_in, to_buffer=False)


def _active_flags(work: LocalChunk, received: Tensor) -> Tensor:
    """Return, float32, for each owned matrix the flag that goes back: 1 if any rank had a gradient, else 0."""
    matrices, flags = work.presence_in
    present = torch.zeros(len(work.chunk.messages.owner.matrices), dtype=torch.float32, device=received.device)
    return present.index_add_(0, matrices, received.index_select(0, flags).float()).clamp_(max=1)
