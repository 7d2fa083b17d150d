"""A chunk's way through the step when its matrices are sharded: to their owners, through the iteration, and back."""

from __future__ import annotations

from collections import deque
from typing import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..parameters import GradientScaling
from ..polar import polar_factors
from ..rules.descent import Destination, descend_packed_
from ..rules.momentum import pack_momentum_
from ..rules.qk_clip import scaled_rows
from .agreement import Accord, shortened
from .exchange import Transfer, assemble_, disassemble_, send_presence_, send_verdicts_, start, verdicts
from .exchange_plan import ShardedChunk
from .pipeline import Part, Recipe, row_scales, seeds
from .placement import this_rank
from .plan import Matrix

_DONE = object()


def update_chunk(
    chunk: ShardedChunk,
    parts: Mapping[Matrix, Part],
    recipe: Recipe,
    accord: Accord,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Iterator[None]:
    """Update the held `parts` of a chunk and their momentum; yields twice, once after each started exchange.

    A part whose rank has no gradient counts as zero if another one has one. Then its momentum, too, follows; else all
    is left alone, as where ranks differ about settings, of which `accord` is told. What is not known before the second
    exchange is kept beside the buffer until then.
    """
    messages = chunk.messages
    held = [parts[matrix] for matrix in messages.held]
    late = [i for i, part in enumerate(held) if part.gradients is None]
    buffers = [part.buffer.clone() if part.gradients is None else part.buffer for part in held]
    gradients = [_gradient(part) for part in held]
    outgoing = _buffer(messages.gather.sent, messages.scratch, chunk.packed_dtype, device)
    with record_function("muon.pack"):
        if held:
            pack_momentum_(buffers, gradients, outgoing, recipe.momentum, recipe.scaling, messages.gathered)
            send_presence_(outgoing, messages, late, accord.code)
    del gradients  # which may be the last to hold their memory
    transfer = start(messages.gather, outgoing, group)
    yield
    received = _received(transfer, chunk)
    returned = _orthogonalized(chunk, received, recipe.eps, accord.code)
    transfer = start(messages.scatter, returned, group)
    yield
    updates = _received(transfer, chunk)
    if held:
        with record_function("muon.descend"):
            found = updates.index_select(0, torch.tensor(messages.verdicts, device=device))
            accord.note(chunk.names, found)
            _descend_(chunk, held, updates, recipe, found > 0)
            _follow_(held, late, buffers, recipe.scaling, found > 0)


def _descend_(chunk: ShardedChunk, held: Sequence[Part], updates: Tensor, recipe: Recipe, alive: Tensor) -> None:
    """Update the parameters of those parts that are `alive`."""
    multipliers = torch.tensor(chunk.multipliers, dtype=torch.float64, device="cpu")
    rule = recipe.descent._replace(multiplier=multipliers)
    origins = [number for part in held for number in part.origin] if held[0].seed is not None else None
    places, overflow = chunk.messages.scattered, recipe.scaling.found_inf
    destination = Destination(row_scales(held), seeds(held), overflow, alive, places, origins)
    descend_packed_([part.parameter for part in held], updates, rule, destination)


def _follow_(
    held: Sequence[Part], late: Sequence[int], buffers: Sequence[Tensor], scaling: GradientScaling, alive: Tensor
) -> None:
    """Give those `late` parts that are `alive` the momentum in `buffers`, and the others QK-clip's rows alone."""
    for i in late:
        part = held[i]
        part.buffer.copy_(torch.where(alive[i], buffers[i], part.buffer))
        if part.row_scale is not None:
            scaled = scaled_rows(part.parameter, part.row_scale, scaling.found_inf)
            part.parameter.copy_(torch.where(alive[i], part.parameter, scaled))


def run_pipeline(chunks: Iterable[Iterator[None]], depth: int) -> None:
    """Advance up to `depth` chunks in turn, the newest first, so that its exchange flies while older ones compute."""
    waiting, running = deque(chunks), []
    while waiting or running:
        if waiting and len(running) < depth:
            running.insert(0, waiting.popleft())
        running = [chunk for chunk in running if next(chunk, _DONE) is not _DONE]


@record_function("muon.orthogonalize")
def _orthogonalized(chunk: ShardedChunk, received: Tensor, eps: float, code: int) -> Tensor:
    """Return the buffer that is sent back: the blocks of the owned matrices' polar factors, and their flags."""
    messages = chunk.messages
    packed: dict[int, Tensor] = {}
    position = {matrix: k for k, matrix in enumerate(messages.owned)}
    stacks = []
    for batch in chunk.batches:
        shape = (batch.cols, batch.rows) if batch.turned else (batch.rows, batch.cols)
        stack = received.new_empty(len(batch.members), *shape)
        stacks.append(stack)
        packed.update(zip((position[m] for m in batch.members), stack.mT if batch.turned else stack))
    assemble_([packed[k] for k in range(len(packed))], messages.blocks_in, received)
    for batch, stack in zip(chunk.batches, stacks):
        factors = polar_factors(stack, batch.iteration, eps)
        packed.update(zip((position[m] for m in batch.members), factors.mT if batch.turned else factors))
    returned = _buffer(messages.scatter.sent, 0, chunk.work_dtype, received.device)
    disassemble_(returned, messages.blocks_out, [packed[k] for k in range(len(packed))])
    send_verdicts_(returned, messages, verdicts(messages, received, code))
    return returned


@record_function("muon.wait")
def _received(transfer: Transfer, chunk: ShardedChunk) -> Tensor:
    try:
        return transfer.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {this_rank()} waits in vain for the other ranks' parts of {shortened(chunk.names)}: one has died, "
            f"is late, or has gone another way ({error})"
        ) from error


def _gradient(part: Part) -> Tensor:
    return torch.zeros_like(part.buffer) if part.gradients is None else part.gradients.take(part.position)


def _buffer(lengths: Sequence[int], scratch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(sum(lengths) + scratch, dtype=dtype, device=device)
