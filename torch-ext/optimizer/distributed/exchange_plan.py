"""Which matrices are exchanged, and in which chunks: the plan of what is sharded or has copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..iteration import iteration_costs
from ..kernels.gemms import SINGLE
from .exchange import Flags, flags_of
from .messages import Block, Chunk, Unit, plan_chunks
from .placement import Layout, some_copies, this_rank
from .plan import Batch, Matrix, Planned, plan_batches, positions_by
from .shards import Shards, Sheet

# Copies of a matrix are orthogonalized once, and sent, where a step costs more FLOPs; a guess, not measured.
WORTH_SENDING = 2**28

# FLOPs in whose time an element goes over the wire: 4e14 FLOPs and 5e10 bytes a second, of two bytes each. It keeps
# long thin matrices, which cost few FLOPs, from meeting on one rank.
FLOPS_OF_AN_ELEMENT = 2**14

CHUNK_BYTES = 256 * 2**20


class OwnedBatch(NamedTuple):
    """A batch of matrices that a rank owns, and the blocks of them that come and go: `matrix` counts the batch's.

    `positions` are those of its members among all that are owned of the chunk, int64 on the device.
    """

    batch: Batch
    positions: Tensor
    blocks_in: tuple[Block, ...]
    blocks_out: tuple[Block, ...]


@dataclass(frozen=True)
class ShardedChunk:
    """The messages of a chunk, the batches of the matrices that this rank owns, and the multipliers of those it holds.

    All have one dtype and device, one work dtype and one recipe.
    """

    messages: Chunk
    flags: Flags
    batches: tuple[OwnedBatch, ...]
    multipliers: Tensor  # of the held parts, float64 on the CPU, where the descent reads it
    names: tuple[str, ...]  # of the parameters
    packed_dtype: torch.dtype
    work_dtype: torch.dtype

    def sent_bytes(self, own: int) -> int:
        """Return what goes to other ranks in both exchanges; `own` is this rank's position among them."""
        gather, scatter = (sum(side.sent) - side.sent[own] for side in (self.messages.gather, self.messages.scatter))
        return gather * self.packed_dtype.itemsize + scatter * self.work_dtype.itemsize


def buffer_bytes(chunk: Chunk, packed: int, work: int) -> int:
    """Return what the buffers of a chunk take at most: while it is gathered, worked on by owners, or comes back.

    `packed` and `work` are the bytes of an element on the way to the owners and back.
    """
    received, returned = sum(chunk.gather.received), sum(chunk.scatter.sent)
    return max(
        (sum(chunk.gather.sent) + chunk.scratch + received) * packed,
        received * packed + returned * work,
        (returned + sum(chunk.scatter.received)) * work,
    )


class Sharing(NamedTuple):
    """How matrices of several ranks are exchanged: see `Muon`."""

    ranks: Optional[tuple[int, ...]] = None  # that each have a copy of every plain parameter
    chunk_bytes: Optional[int] = None
    chunks_in_flight: int = 2
    release_grads: bool = False
    sum_gram: bool = False

    def checked(self) -> Sharing:
        """Return it; ValueError or TypeError for what cannot work."""
        for key in ("chunk_bytes", "chunks_in_flight"):
            value = getattr(self, key)
            if value is None and key == "chunk_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{key} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
        for key in ("release_grads", "sum_gram"):
            if not isinstance(getattr(self, key), bool):
                raise TypeError(f"{key} must be True or False, got {getattr(self, key)!r}")
        return self


@dataclass(frozen=True)
class Exchange:
    """Chunks that are exchanged among `ranks`, in rising order, of the `holders` of the parameters."""

    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    chunks: tuple[ShardedChunk, ...]
    loads: tuple[int, ...]  # cost of each rank's matrices

    def __str__(self) -> str:
        sent = sum(chunk.sent_bytes(self.ranks.index(this_rank())) for chunk in self.chunks)
        imbalance = max(self.loads) * len(self.loads) / max(sum(self.loads), 1)
        sizes = [(chunk.messages, chunk.packed_dtype.itemsize, chunk.work_dtype.itemsize) for chunk in self.chunks]
        buffers = max(buffer_bytes(*size) for size in sizes)
        return (
            f"{len(self.chunks)} chunks among {len(self.ranks)} ranks, {2 * len(self.chunks)} messages; this rank "
            f"sends {sent / 2**20:.1f} MiB a step, and has buffers of up to {buffers / 2**20:.1f} MiB for a chunk; the "
            f"largest load is {imbalance:.2f} of the mean"
        )


def is_exchanged(shards: Shards, index: int) -> bool:
    """Whether a matrix goes to an owner: it lies in parts, or in copies that are worth sending."""
    if not shards.is_whole(index):
        return True
    return shards.layout.copies > 1 and flops(*shards.view.shapes[index]) > WORTH_SENDING


def split_matrices(number: int, sheet: Sheet) -> tuple[dict[Matrix, tuple[int, int]], dict[Matrix, tuple[int, int]]]:
    """Return the matrices of the parameter of this number with their sizes: those worked on here, those exchanged."""
    sizes = {Matrix(number, i): size for i, size in enumerate(sheet.whole.shapes)}
    if sheet.shards is None:
        return sizes, {}
    sent = {matrix: size for matrix, size in sizes.items() if is_exchanged(sheet.shards, matrix.index)}
    return {m: sizes[m] for m in (Matrix(number, i) for i in sheet.indices) if m not in sent}, sent


def flops(rows: int, cols: int) -> int:
    """Return the FLOPs of one step of the standard iteration, 4 m² n + 2 m³, by products that save nothing."""
    return int(iteration_costs(*sorted((rows, cols)), 1, 1, SINGLE)[0])


def plan_exchanges(
    planned: Sequence[Planned], shards: Mapping[int, Shards], rank: int, chunk_bytes: Optional[int]
) -> tuple[Exchange, ...]:
    """Return what `rank` exchanges of `planned`, whose parameters lie as `shards` says, by their number.

    A chunk holds matrices of at most `chunk_bytes`, None: CHUNK_BYTES, on each rank, or one for each part of a matrix.
    """
    every = [(own, matrix, size) for own in planned for matrix, size in own.matrices.items()]
    owners = {matrix: own for own, matrix, _ in every}
    keys = [(shards[matrix.parameter].layout.mesh.members, *own.kind[:3], own.settings) for own, matrix, _ in every]
    exchanges = []
    # By ranks, so that two ranks that meet in several exchanges come to them in one order.
    for positions in sorted(positions_by(keys), key=lambda own: keys[own[0]][0]):
        holders, first = keys[positions[0]][0], every[positions[0]][0]
        steps = len(first.settings.schedule)
        units = [unit_of(every[i][1], shards[every[i][1].parameter], steps) for i in positions]
        limit = (chunk_bytes or CHUNK_BYTES) // first.packed_dtype.itemsize
        for ranks, own in among_useful_copies(units, rank).items():
            sides, loads = plan_chunks(own, ranks, rank, limit)
            chunks = tuple(_sharded_chunk(side, owners, first, chunk_bytes) for side in sides)
            exchanges.append(Exchange(holders, ranks, chunks, loads))
    return tuple(exchanges)


def unit_of(matrix: Matrix, shards: Shards, steps: int) -> Unit:
    """Return a matrix with its cost: so many steps and the way to its owner, in FLOPs, the same on all devices."""
    rows, cols = shards.view.shapes[matrix.index]
    return Unit(matrix, shards, steps * flops(rows, cols) + FLOPS_OF_AN_ELEMENT * rows * cols)


def among_useful_copies(units: Sequence[Unit], rank: int) -> dict[tuple[int, ...], list[Unit]]:
    """Return the ranks that work together with `rank`, each with what they work on: so many copies as save time.

    No step is shorter than its largest matrix takes on one rank. Where fewer copies can do all the work in that time,
    they do, and others do the same, each group for itself: more owners would only send each result to more ranks.
    """
    costs = [unit.cost for unit in units if unit.shards.layout.copies > 1] or [1]
    useful = max(2, math.ceil(sum(costs) / max(costs)))
    found: dict[tuple[int, ...], list[Unit]] = {}
    counts: dict[Layout, int] = {}
    for unit in units:
        layout = unit.shards.layout
        if layout not in counts:
            divisors = (count for count in range(1, layout.copies) if layout.copies % count == 0)
            counts[layout] = next((count for count in divisors if count * unit.parts >= useful), layout.copies)
        own = unit.shards._replace(layout=some_copies(layout, counts[layout], rank))
        found.setdefault(own.layout.mesh.members, []).append(unit._replace(shards=own))
    return found


def _sharded_chunk(
    chunk: Chunk, planned: Mapping[Matrix, Planned], first: Planned, chunk_bytes: Optional[int]
) -> ShardedChunk:
    owned = [planned[matrix].only(matrix) for matrix in chunk.owned]
    multipliers = [planned[matrix].multiplier(matrix) for matrix in chunk.held]
    names = tuple(dict.fromkeys(planned[matrix].name for matrix, _ in chunk.owners))
    device = first.parameter.device
    batches = tuple(_owned_batch(batch, chunk, device) for batch in plan_batches(owned, chunk_bytes))
    flags = flags_of(chunk, device)
    scale = torch.tensor(multipliers, dtype=torch.float64, device="cpu")
    return ShardedChunk(chunk, flags, batches, scale, names, first.packed_dtype, first.work_dtype)


def _owned_batch(batch: Batch, chunk: Chunk, device: torch.device) -> OwnedBatch:
    positions = [chunk.owned.index(matrix) for matrix in batch.members]
    place = {position: i for i, position in enumerate(positions)}

    def own(blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(block._replace(matrix=place[block.matrix]) for block in blocks if block.matrix in place)

    return OwnedBatch(batch, torch.tensor(positions, device=device), own(chunk.blocks_in), own(chunk.blocks_out))
