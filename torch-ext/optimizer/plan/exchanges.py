"""Exchanges: which ranks work together on which matrices, and in which chunks those travel."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Optional, Sequence

from torch.distributed import ProcessGroup

from ..parameters.settings import flag
from .batches import Batch, grouped, plan_batches
from .blocks import Block, blocks_of
from .layout import Layout, replica_subset
from .matrix import Matrix, names_of_parameters
from .messages import Messages, plan_messages
from .process_groups import Ranks, shortened
from .shards import shards_of

CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ExchangeOptions:
    """How ranks share the work on matrices.

    process_group: ranks that each hold a copy of every plain parameter, as under DDP: they share the work.
    chunk_bytes: of directions that a rank holds for each chunk of exchanged matrices; None: 256 MiB.
    chunks_in_flight: how many chunks may be on their way while one is worked on; more than two are of no use.
    sum_gram: where a matrix lies in parts along its long side, and that costs less, sum its Gram matrix over the ranks
        instead of sending the parts to an owner; updates are rounded differently. `explain()` says where.
    """

    process_group: Optional[ProcessGroup] = None
    chunk_bytes: Optional[int] = None
    chunks_in_flight: int = 2
    sum_gram: bool = False

    def __post_init__(self):
        for key in ("chunk_bytes", "chunks_in_flight"):
            value = getattr(self, key)
            if value is None and key == "chunk_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{key} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
        flag("sum_gram", self.sum_gram)


@dataclass(frozen=True, eq=False)
class OwnedBatch:
    """A batch of matrices that this rank owns in a chunk, and the blocks of them that come and go."""

    batch: Batch
    positions: tuple[int, ...]  # of its matrices among all that are owned of the chunk
    blocks_in: tuple[Block, ...]
    blocks_out: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Matrices of one family that travel together: this rank's messages, and the batches that it owns of them."""

    messages: Messages
    batches: tuple[OwnedBatch, ...]
    names: str  # of some of the parameters, for errors

    @property
    def first(self) -> Matrix:
        """A matrix that stands for all in what they have in common; this rank may neither hold nor own any."""
        return self.messages.owners[0][0]


@dataclass(frozen=True, eq=False)
class Exchange:
    """Chunks that are exchanged among `ranks`, seen from the rank at `position` among them."""

    ranks: Ranks
    position: int
    chunks: tuple[Chunk, ...]
    loads: tuple[int, ...]  # cost of each rank's matrices

    def __str__(self) -> str:
        parameter = self.chunks[0].first.parameter
        sizes = parameter.packed_dtype.itemsize, parameter.work_dtype.itemsize
        sent = sum(chunk.messages.sent_bytes(self.position, *sizes) for chunk in self.chunks)
        imbalance = max(self.loads) * len(self.loads) / max(sum(self.loads), 1)
        buffers = max(chunk.messages.buffer_bytes(*sizes) for chunk in self.chunks)
        return (
            f"{len(self.chunks)} chunks among {len(self.ranks)} ranks, {2 * len(self.chunks)} messages; this rank "
            f"sends {sent / 2**20:.1f} MiB a step, and has buffers of up to {buffers / 2**20:.1f} MiB for a chunk; the "
            f"largest load is {imbalance:.2f} of the mean"
        )


def plan_exchanges(matrices: Sequence[Matrix], rank: int, chunk_bytes: Optional[int]) -> tuple[Exchange, ...]:
    """Return what `rank` exchanges of `matrices`, which all have an owner.

    A chunk holds matrices of at most `chunk_bytes`, None: CHUNK_BYTES, on each rank, or one for each part of a matrix.
    """
    by_parameter = (list(some) for _, some in itertools.groupby(matrices, lambda matrix: matrix.parameter))
    families = grouped(by_parameter, lambda some: some[0].parameter.family)
    exchanges = []
    # By ranks, so that two ranks that meet in several exchanges come to them in one order.
    for family in sorted(families, key=lambda family: family[0][0].parameter.sharers):
        members = list(itertools.chain.from_iterable(family))
        limit = (chunk_bytes or CHUNK_BYTES) // members[0].parameter.packed_dtype.itemsize
        for ranks, replicas in replica_groups(members, rank).items():
            messages, loads = plan_messages(replicas, ranks, rank, limit)
            chunks = tuple(_chunk(each, chunk_bytes) for each in messages)
            exchanges.append(Exchange(ranks, ranks.index(rank), chunks, loads))
    return tuple(exchanges)


def replica_groups(matrices: Sequence[Matrix], rank: int) -> dict[Ranks, list[Matrix]]:
    """Group replicas: return, for each group that `rank` belongs to, its ranks and the matrices they share.

    No step is shorter than its largest matrix takes on one rank. A group has just enough replicas that its total work
    takes no longer than that; the others form groups of their own and repeat it. For example, of 64 replicas of 10
    equal matrices groups of 16 are formed: more owners would only send each result to more ranks.
    """
    costs = [matrix.cost for matrix in matrices if matrix.shards.copies > 1] or [1]
    useful = max(2, math.ceil(sum(costs) / max(costs)))
    groups: dict[Ranks, list[Matrix]] = {}
    counts: dict[Layout, int] = {}
    for shards, some in itertools.groupby(matrices, lambda matrix: matrix.shards):
        members, layout, copies = list(some), shards.layout, shards.copies
        if layout not in counts:
            divisors = (count for count in range(1, copies) if copies % count == 0)
            counts[layout] = next((count for count in divisors if count * members[0].parts >= useful), copies)
        if counts[layout] < copies:
            layout = replica_subset(layout, counts[layout], rank)
            members = [replace(matrix, shards=shards_of(shards.view, layout)) for matrix in members]
        groups.setdefault(layout.mesh.members, []).extend(members)
    return groups


def _chunk(messages: Messages, chunk_bytes: Optional[int]) -> Chunk:
    positions = {matrix: i for i, matrix in enumerate(messages.owner.matrices)}
    batches = plan_batches(messages.owner.matrices, chunk_bytes)
    owned = tuple(_owned_batch(batch, [positions[m] for m in batch.matrices], messages) for batch in batches)
    return Chunk(messages, owned, shortened(names_of_parameters(matrix for matrix, _ in messages.owners)))


def _owned_batch(batch: Batch, positions: Sequence[int], messages: Messages) -> OwnedBatch:
    in_batch = {position: i for i, position in enumerate(positions)}
    blocks_in, blocks_out = (blocks_of(p, in_batch) for p in (messages.owner.parts_in, messages.owner.parts_out))
    return OwnedBatch(batch, tuple(positions), blocks_in, blocks_out)
