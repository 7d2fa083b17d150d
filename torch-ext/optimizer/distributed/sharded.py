"""A chunk's way through the step when its matrices are sharded: to their owners, through the iteration, and back."""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..parameters import GradientScaling
from ..polar import polar_factors
from ..rules.descent import Destination, descend_packed_
from ..rules.momentum import pack_momentum_
from ..rules.qk_clip import scaled_rows
from .agreement import Accord, shortened, waiting
from .exchange import Transfer, assemble_, disassemble_, send_presence_, send_verdicts_, start, verdicts
from .exchange_plan import OwnedBatch, ShardedChunk
from .pipeline import LocalMatrix, Recipe, norms_of, packed_row_scales, seeds
from .plan import Batch, Matrix


def update_chunk(
    chunk: ShardedChunk,
    parts: Mapping[Matrix, LocalMatrix],
    recipe: Recipe,
    accord: Accord,
    group: dist.ProcessGroup,
    seen: list[tuple[Batch, Tensor]],
) -> Iterator[None]:
    """Update the held `parts` of a chunk and their momentum; yields twice, once after each started exchange.

    A part whose rank has no gradient counts as zero if another one has one. Then its momentum, too, follows; else all
    is left alone, as where ranks differ about settings, of which `accord` is told. What is not known before the second
    exchange is kept beside the buffer until then. `seen` gets the batches of owned matrices and the norms of their
    updates, 0 for those that are left alone.
    """
    messages = chunk.messages
    held = [parts[matrix] for matrix in messages.held]
    late = [i for i, part in enumerate(held) if part.gradients is None]
    buffers = [part.buffer.clone() if part.gradients is None else part.buffer for part in held]
    gradients = [_gradient(part) for part in held]
    size = sum(messages.gather.sent) + messages.scratch
    outgoing = torch.empty(size, dtype=chunk.packed_dtype, device=chunk.flags.presence.device)
    with record_function("muon.pack"):
        if held:
            pack_momentum_(buffers, gradients, outgoing, recipe.momentum, recipe.scaling, messages.gathered)
            send_presence_(outgoing, chunk.flags, late, accord.code)
    del gradients  # which may be the last to hold their memory
    transfer = start(messages.gather, outgoing, group)
    del outgoing  # as long as it is needed the transfer holds it
    yield
    received = _received(transfer, chunk)
    del transfer
    returned = _orthogonalized(chunk, received, recipe.eps, accord.code, seen)
    del received
    transfer = start(messages.scatter, returned, group)
    del returned
    yield
    updates = _received(transfer, chunk)
    del transfer
    if held:
        with record_function("muon.descend"):
            found = updates.index_select(0, chunk.flags.verdicts)
            accord.note(chunk.names, found)
            _descend_(chunk, held, updates, recipe, found > 0)
            _follow_(held, late, buffers, recipe.scaling, found > 0)


def _descend_(chunk: ShardedChunk, held: Sequence[LocalMatrix], updates: Tensor, recipe: Recipe, alive: Tensor) -> None:
    """Update the parameters of those parts that are `alive`."""
    multipliers = torch.tensor(chunk.multipliers, dtype=torch.float64, device="cpu")
    rule = recipe.descent._replace(multiplier=multipliers)
    origins = [number for part in held for number in part.origin] if held[0].seed is not None else None
    places, overflow = chunk.messages.scattered, recipe.scaling.found_inf
    destination = Destination(packed_row_scales(held), seeds(held), overflow, alive, places, origins)
    descend_packed_([part.parameter for part in held], updates, rule, destination)


def _follow_(
    held: Sequence[LocalMatrix], late: Sequence[int], buffers: Sequence[Tensor], scaling: GradientScaling, alive: Tensor
) -> None:
    """Give those `late` parts that are `alive` the momentum in `buffers`, and the others QK-clip's rows alone."""
    for i in late:
        part = held[i]
        part.buffer.copy_(torch.where(alive[i], buffers[i], part.buffer))
        if part.row_scale is not None:
            scaled = scaled_rows(part.parameter, part.row_scale, scaling.found_inf)
            part.parameter.copy_(torch.where(alive[i], part.parameter, scaled))


@record_function("muon.orthogonalize")
def _orthogonalized(
    chunk: ShardedChunk, received: Tensor, eps: float, code: int, seen: list[tuple[Batch, Tensor]]
) -> Tensor:
    """Return the buffer that is sent back: the blocks of the owned matrices' polar factors, and their flags."""
    messages = chunk.messages
    found = verdicts(chunk.flags, len(messages.owned), received, code)
    returned = torch.empty(sum(messages.scatter.sent), dtype=chunk.work_dtype, device=received.device)
    for owned in chunk.batches:
        factors = polar_factors(_assembled(owned, received), owned.batch.iteration, eps)
        disassemble_(returned, owned.blocks_out, owned.batch.unturned(factors))
        seen.append((owned.batch, norms_of(factors).where(found.index_select(0, owned.positions) > 0, 0.0)))
    send_verdicts_(returned, chunk.flags, found)
    return returned


def _assembled(owned: OwnedBatch, received: Tensor) -> Tensor:
    """Return the matrices of a batch, packed."""
    packed, directions = owned.batch.empty(len(owned.positions), received.device)
    assemble_(directions, owned.blocks_in, received)
    return packed


@record_function("muon.wait")
def _received(transfer: Transfer, chunk: ShardedChunk) -> Tensor:
    with waiting(f"parts of {shortened(chunk.names)}"):
        return transfer.wait()


def _gradient(part: LocalMatrix) -> Tensor:
    return torch.zeros_like(part.parameter) if part.gradients is None else part.gradients.take(part.position)
