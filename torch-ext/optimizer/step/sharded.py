"""A chunk's way through the step when its matrices are sharded: to their owners, through the iteration, and back."""

from __future__ import annotations

from typing import Container, Generator, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..kernels.host_copy import moved
from ..kernels.native import move_blocks_
from ..parameters.state import REMAINDER
from ..plan.exchanges import Chunk
from ..plan.process_groups import explaining_timeouts, group_of
from ..rules.descent import DescentOptions, Number, scale_rows_
from ..rules.momentum import Directions, MomentumBuffers, pack_momentum_
from .finish import UpdateNorms, descend_parts_, finish_updates_
from .graphs import BatchToPack
from .local_chunk import LocalChunk, LocalOwnedBatch
from .local_matrix import ROW_SCALE, LocalMatrix, momentum_of
from .polar_update import as_parameter, equalized, packed_memory, updates_of_batch_
from .recipe import Recipe, StepContext
from .team import team_factor


def update_chunk_(
    work: LocalChunk, context: StepContext, group: dist.ProcessGroup
) -> Generator[None, None, list[UpdateNorms]]:
    """Update this rank's parts of a chunk and their momentum; yields twice, once after each started exchange.

    Matrices without a gradient on any rank are unchanged. Returns the norms of the updates of owned matrices.
    """
    chunk, holder, owner = work.chunk, work.chunk.messages.holder, work.chunk.messages.owner
    parameter, recipe = chunk.first.parameter, context.recipe(work.recipe_key)
    parts = ShardedParts(work.parts, recipe)
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
        returned, norms = _orthogonalized(work, received, context)
    del received
    updates = yield from _exchanged(chunk, returned, owner.sent, holder.received, group)
    del returned
    if work.parts:
        active_flags = updates.index_select(0, work.active_in)
        parts.descend_(updates, work.multipliers, active_flags, work.updates)
        if work.moments is not None:
            work.moments.take_(updates, work.parts, active_flags > 0, recipe.scaling.found_inf)
    return norms


def _write_flags_(outgoing: Tensor, work: LocalChunk, absent: Container[int]) -> None:
    """Write into `outgoing`, for each part that is sent, 1 if there is a gradient, else 0; no device is waited for."""
    if not absent:
        outgoing.index_fill_(0, work.presence_out, 1.0)
        return
    flags = torch.tensor([float(i not in absent) for i in work.sent], dtype=outgoing.dtype, device="cpu")
    outgoing.index_copy_(0, work.presence_out, moved(flags, outgoing.device))


class ShardedParts:
    """A rank's parts between pack and descent.

    A part without a gradient counts as zero if another rank has one. Whether one has is known only when the owner's
    flag comes back. Until then the momentum of such a part, an absent one, is updated in a copy.
    """

    def __init__(self, parts: Sequence[LocalMatrix], recipe: Recipe):
        self.parts = parts
        self.absent = frozenset(i for i, part in enumerate(parts) if not part.source.has_gradient)
        self._recipe = recipe
        self._momenta = MomentumBuffers(())

    def pack_(self, packed: Tensor, offsets: Optional[Sequence[int]] = None) -> None:
        """Take the gradients into the momentum buffers, and write the directions into `packed`, at `offsets` of it."""
        with record_function("muon.pack"):
            self._momenta = momentum_of(self.parts)
            for tensors in filter(None, self._momenta):
                for i in self.absent:
                    tensors[i] = tensors[i].clone()
            gradients = [
                part.source.take_gradient(part.slot) if part.source.has_gradient else torch.zeros_like(part.view)
                for part in self.parts
            ]
            directions = Directions(packed, offsets)
            pack_momentum_(self._momenta, gradients, directions, self._recipe.momentum, self._recipe.scaling)

    def descend_(
        self, updates: Tensor, multiplier: Number, active_flags: Tensor, offsets: Optional[Sequence[int]] = None
    ) -> None:
        """Update those parts whose flag is above zero, by `updates`, at `offsets` of that buffer."""
        parts, active = self.parts, active_flags > 0
        origins = None if parts[0].origin is None else [number for part in parts for number in part.origin]
        options = DescentOptions(active=active, offsets=offsets, origins=origins)
        with record_function("muon.descend"):
            descend_parts_(parts, updates, self._recipe, multiplier, options)
            for i in sorted(self.absent):
                self._settle_absent_(i, active[i])

    def _settle_absent_(self, i: int, active: Tensor) -> None:
        """Take over the momentum of the absent part at `i` if its matrix is active, and scale its rows if it is not."""
        part = self.parts[i]
        for kept, updated in zip(momentum_of([part]).tensors_of(0), self._momenta.tensors_of(i)):
            kept.copy_(torch.where(active, updated, kept))
        row_scale, unless = part.get(ROW_SCALE), [self._recipe.scaling.found_inf, active]
        if row_scale is not None:  # QK-clip applies to weights without a gradient too
            scale_rows_(part.view, row_scale, part.get(REMAINDER), unless)


def _exchanged(
    chunk: Chunk, buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Generator[None, None, Tensor]:
    """Send the front of `buffer`, `sent` elements to each rank, and return what has come; yields once, meanwhile."""
    front, incoming = buffer[: sum(sent)], buffer.new_empty(sum(received))
    with record_function("muon.send"), explaining_timeouts("parts", chunk.names):
        pending = dist.all_to_all_single(incoming, front, list(received), list(sent), group=group, async_op=True)
    yield
    with record_function("muon.wait"), explaining_timeouts("parts", chunk.names):
        pending.wait()
    return incoming


def _orthogonalized(work: LocalChunk, received: Tensor, context: StepContext) -> tuple[Tensor, list[UpdateNorms]]:
    """Return what is sent back, the blocks of the owned matrices' updates and their flags; and the updates' norms."""
    chunk, norms, eps = work.chunk, [], context.recipe(work.recipe_key).eps
    active_flags = _active_flags(work, received)
    returned = received.new_empty(sum(chunk.messages.owner.sent), dtype=chunk.first.parameter.update_dtype)

    def finish_(owned: LocalOwnedBatch, updates: Tensor) -> None:
        active = active_flags.index_select(0, owned.positions) > 0
        norms.append(_finish_owned_(owned, updates, active, received, returned, context))

    for team, owned in work.teams:
        packed = None if owned is None else packed_memory(owned.batch, 1)
        if packed is not None:
            _assemble_(owned, received, packed)
            packed = equalized(owned.batch, packed, eps)
        factor = team_factor(team, packed, eps, group_of(team.ranks, chunk.names))
        del packed
        if owned is not None:
            finish_(owned, updates_of_batch_(owned.batch, factor))
        del factor
    for chain in work.owned:
        packed = context.graphs.packed([BatchToPack(owned.batch, len(owned.positions), eps) for owned in chain])
        for owned, member in zip(chain, packed.members):
            _assemble_(owned, received, member.directions)
            member.take_norms_()
        updates = packed.update()
        for each in zip(chain, updates):
            finish_(*each)
        del packed, updates, member, each  # before the next chain is put together
    matrices, flags = work.active_out
    returned.index_copy_(0, flags, active_flags.index_select(0, matrices).to(returned.dtype))
    return returned, norms


def _finish_owned_(
    owned: LocalOwnedBatch, updates: Tensor, active: Tensor, received: Tensor, returned: Tensor, context: StepContext
) -> UpdateNorms:
    """Write the blocks of a batch's updates, and of its new second moments, into `returned`; return the norms.

    `active` says which matrices have a gradient on any rank. Updates are balanced by the second moments in `received`.
    Where norms of matrices are kept it is the new matrices that are written, made of those in `received`.
    """
    batch, parameter, recipe = owned.batch, owned.batch.first.parameter, context.recipe(owned.recipe_key)
    moments = weights = None
    if batch.moments_shape is not None:
        moments = updates.new_empty(len(updates), *batch.moments_shape, dtype=parameter.moments_dtype)
        move_blocks_(moments, received.view(moments.dtype), owned.moments_in, to_buffer=False)
    if parameter.keeps_norm:
        weights = received.new_empty(updates.shape)
        move_blocks_(weights, received, owned.weights_in, to_buffer=False)
    updates, norms = finish_updates_(updates, recipe, moments, weights)
    if moments is not None:
        move_blocks_(moments, returned.view(moments.dtype), owned.moments_out, to_buffer=True)
    move_blocks_(updates, returned, owned.blocks_out, to_buffer=True)
    return UpdateNorms(norms, updates[0].numel(), batch.first.multiplier, recipe.descent.lr, active)


def _assemble_(owned: LocalOwnedBatch, received: Tensor, packed: Tensor) -> None:
    """Write the matrices of a batch, packed, from the blocks that have come."""
    move_blocks_(as_parameter(owned.batch, packed), received, owned.blocks_in, to_buffer=False)


def _active_flags(work: LocalChunk, received: Tensor) -> Tensor:
    """Return, float32, for each owned matrix the flag that goes back: 1 if any rank had a gradient, else 0."""
    matrices, flags = work.presence_in
    present = torch.zeros(len(work.chunk.messages.owner.matrices), dtype=torch.float32, device=received.device)
    return present.index_add_(0, matrices, received.index_select(0, flags).float()).clamp_(max=1)
