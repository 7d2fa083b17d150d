"""A chunk's way through the step when its matrices are sharded: to their owners, through the iteration, and back."""

from __future__ import annotations

from typing import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..polar import polar_factors
from .agreement import Accord, shortened, waiting
from .exchange import Transfer, assemble_, disassemble_, send_presence_, send_verdicts_, start, verdicts
from .exchange_plan import OwnedBatch, ShardedChunk
from .held import Held
from .messages import Side
from .pipeline import LocalMatrix, Recipe, norms_of
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

    What nobody has a gradient of is left alone, as where copies are at odds about that, of which `accord` is told.
    `seen` gets the batches of owned matrices and the norms of their updates, 0 for those that are left alone.
    """
    messages = chunk.messages
    held = Held([parts[matrix] for matrix in messages.held])
    size = sum(messages.gather.sent) + messages.scratch
    outgoing = torch.empty(size, dtype=chunk.packed_dtype, device=chunk.flags.presence.device)
    if held.parts:
        held.pack_(outgoing, recipe, messages.gathered)
        send_presence_(outgoing, chunk.flags, held.late)
    transfer = _started(messages.gather, outgoing, group, chunk)
    del outgoing  # as long as it is needed the transfer holds it
    yield
    received = _received(transfer, chunk)
    del transfer
    returned = _orthogonalized(chunk, received, recipe.eps, seen)
    del received
    transfer = _started(messages.scatter, returned, group, chunk)
    del returned
    yield
    updates = _received(transfer, chunk)
    del transfer
    if held.parts:
        found = updates.index_select(0, chunk.flags.verdicts)
        accord.note(chunk.names, found)
        held.descend_(updates, recipe, chunk.multipliers, found, messages.scattered)


@record_function("muon.orthogonalize")
def _orthogonalized(chunk: ShardedChunk, received: Tensor, eps: float, seen: list[tuple[Batch, Tensor]]) -> Tensor:
    """Return the buffer that is sent back: the blocks of the owned matrices' polar factors, and their flags."""
    messages = chunk.messages
    found = verdicts(chunk.flags, len(messages.owned), received)
    returned = torch.empty(sum(messages.scatter.sent), dtype=chunk.work_dtype, device=received.device)
    for owned in chunk.batches:
        norms = _return_(returned, owned, received, eps)
        seen.append((owned.batch, norms.where(found.index_select(0, owned.positions) > 0, 0.0)))
    send_verdicts_(returned, chunk.flags, found)
    return returned


def _return_(returned: Tensor, owned: OwnedBatch, received: Tensor, eps: float) -> Tensor:
    """Write the blocks of a batch's polar factors into `returned`; return the norms of the factors."""
    factors = polar_factors(_assembled(owned, received), owned.batch.iteration, eps)
    disassemble_(returned, owned.blocks_out, owned.batch.unturned(factors))
    return norms_of(factors)


def _assembled(owned: OwnedBatch, received: Tensor) -> Tensor:
    """Return the matrices of a batch, packed."""
    packed, directions = owned.batch.empty(len(owned.positions), received.device)
    assemble_(directions, owned.blocks_in, received)
    return packed


def _started(side: Side, buffer: Tensor, group: dist.ProcessGroup, chunk: ShardedChunk) -> Transfer:
    with waiting(f"parts of {shortened(chunk.names)}"):
        return start(side, buffer, group)


@record_function("muon.wait")
def _received(transfer: Transfer, chunk: ShardedChunk) -> Tensor:
    with waiting(f"parts of {shortened(chunk.names)}"):
        return transfer.wait()
