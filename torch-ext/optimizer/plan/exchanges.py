"""Exchanges: which ranks work together on which matrices, and in which chunks the matrices travel."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Optional, Sequence

from ..parameters.names import listed
from ..parameters.sequences import grouped
from .batches import Batch, chains, plan_batches
from .blocks import Block, blocks_of
from .costs import standard_step_flops, useful_chunks, useful_copies
from .exchange_options import ExchangeOptions
from .layout import Layout, mesh_of
from .matrix import Matrix, names_of_parameters
from .messages import Messages, OwnerSide, plan_messages
from .process_groups import Ranks
from .shards import shards_of
from .teams import Team, team_of, with_teams

MOST_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class OwnedBatch:
    """A batch of a chunk's matrices that this rank owns, and the blocks in which their parts arrive and leave.

    It also has the blocks of second moments and of the parameter's elements, if these are sent.
    """

    batch: Batch
    positions: tuple[int, ...]  # of its matrices among all of the chunk that this rank owns
    blocks_in: tuple[Block, ...]
    blocks_out: tuple[Block, ...]
    moments_in: tuple[Block, ...]
    moments_out: tuple[Block, ...]
    weights_in: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Matrices of one family that travel together: this rank's messages, and the batches of them that it owns."""

    messages: Messages
    chains: tuple[tuple[OwnedBatch, ...], ...]
    teams: tuple[tuple[Team, Optional[OwnedBatch]], ...]  # this rank's teams; with a batch if it owns the matrix
    names: str  # of the first few parameters, for error messages

    @property
    def first(self) -> Matrix:
        """The first matrix, from which what all have in common is read; this rank may neither hold nor own it."""
        return self.messages.assignments[0].matrix

    @functools.cached_property
    def profiled_as(self) -> str:
        """The name of this rank's work in a profile: with its FLOPs, unless it includes waiting for a team."""
        if self.teams:
            return "muon.orthogonalize"
        owned = self.messages.owner.matrices
        work = sum(standard_step_flops(m.rows, m.cols) * sum(map(len, m.iteration.windows)) for m in owned)
        return f"muon.orthogonalize {work / 1e9:.6g} GFLOP"


@dataclass(frozen=True, eq=False)
class Exchange:
    """Chunks that are exchanged among `ranks`, as the rank at `position` among them sees them."""

    ranks: Ranks
    position: int
    chunks: tuple[Chunk, ...]
    loads: tuple[int, ...]  # total cost of each rank's matrices
    in_flight: int  # chunks that may be on their way while one is worked on

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends to others in a step."""
        return sum(chunk.messages.sent_bytes(self.position, *self._itemsizes) for chunk in self.chunks)

    def held_bytes(self) -> int:
        """Return the most bytes that this rank holds at a time: buffers of chunks under way, and the work on a chain.

        If this rank lacks a gradient that other ranks have, zeros and a copy of its momentum come on top. So does what
        a CPU keeps from larger batches outside of this exchange.
        """
        buffers = [chunk.messages.buffer_bytes(*self._itemsizes) for chunk in self.chunks]
        together = max(sum(buffers[i : i + self.in_flight + 1]) for i in range(len(buffers)))
        chained = [[each.batch for each in chain] for chunk in self.chunks for chain in chunk.chains]
        works = [(sum(b.memory_bytes for b in chain), sum(b.work_bytes for b in chain)) for chain in chained]
        works += [(0, team.work_bytes) for chunk in self.chunks for team, _ in chunk.teams]
        if not works:
            return together
        if self.chunks[0].first.parameter.device.type == "cpu":  # where memory is kept from batch to batch
            return together + sum(map(max, zip(*works)))
        return together + max(map(sum, works))

    def __str__(self) -> str:
        imbalance = max(self.loads) * len(self.loads) / max(sum(self.loads), 1)
        together = min(self.in_flight + 1, len(self.chunks))
        chunks = "1 chunk" if len(self.chunks) == 1 else f"{len(self.chunks)} chunks"
        return (
            f"{chunks} among {len(self.ranks)} ranks, {2 * len(self.chunks)} messages; this rank "
            f"sends {self.sent_bytes() / 2**20:.1f} MiB a step, and holds up to {self.held_bytes() / 2**20:.1f} MiB, "
            f"with {together} {'chunks' if together > 1 else 'chunk'} under way and one batch worked on; the largest "
            f"load is {imbalance:.2f} of the mean"
        )

    @property
    def _itemsizes(self) -> tuple[int, int]:
        parameter = self.chunks[0].first.parameter
        return parameter.packed_dtype.itemsize, parameter.update_dtype.itemsize


def plan_exchanges(
    matrices: Sequence[Matrix], rank: int, options: ExchangeOptions
) -> tuple[tuple[Exchange, ...], list[Matrix]]:
    """Return the exchanges of `matrices`, as `rank` sees them, and the matrices that it works on alone.

    It works alone on a matrix that it holds whole if each rank with a copy repeats the work, which `replica_groups`
    decides. In an exchange a rank holds at most `chunk_elements` of a chunk, or one matrix for each part if that is
    more.
    """
    chunk_bytes = options.chunk_bytes
    by_parameter = (list(members) for _, members in itertools.groupby(matrices, lambda matrix: matrix.parameter))
    families = grouped(by_parameter, lambda members: members[0].parameter.family)
    exchanges, alone = [], []
    # In the order of their ranks, so that two ranks that meet in several exchanges reach them in the same order.
    for family in sorted(families, key=lambda family: family[0][0].parameter.sharers):
        members = with_teams(list(itertools.chain.from_iterable(family)), options.ranks_per_matrix)
        for ranks, together in replica_groups(members, rank).items():
            alone += [matrix for matrix in together if not matrix.has_owner and rank in matrix.holders]
            replicas = [matrix for matrix in together if matrix.has_owner]
            if not replicas:
                continue
            messages, loads = plan_messages(replicas, ranks, rank, chunk_elements(replicas, ranks, chunk_bytes))
            chunks = tuple(_chunk(each, rank, chunk_bytes) for each in messages)
            exchanges.append(Exchange(ranks, ranks.index(rank), chunks, loads, options.chunks_in_flight))
    return tuple(exchanges), alone


def chunk_elements(matrices: Sequence[Matrix], ranks: Ranks, chunk_bytes: Optional[int]) -> int:
    """Return how many elements a rank holds at most of one chunk of `matrices`, which `ranks` exchange.

    That is as many as `chunk_bytes` hold. None divides the matrices into `useful_chunks`, of MOST_CHUNK_BYTES at most.
    """
    parameter = matrices[0].parameter
    packed, work = parameter.packed_dtype.itemsize, parameter.update_dtype.itemsize
    if chunk_bytes is not None:
        return chunk_bytes // packed
    held = sum(matrix.rows * matrix.cols * matrix.shards.copies for matrix in matrices) / len(ranks)
    cost = sum(matrix.cost for matrix in matrices) / len(ranks)
    useful = useful_chunks(held * (packed + work), cost, len(ranks))
    return min(math.ceil(held / useful), MOST_CHUNK_BYTES // packed)


def replica_groups(matrices: Sequence[Matrix], rank: int) -> dict[Ranks, list[Matrix]]:
    """Group replicas: return, for each group that `rank` belongs to, its ranks and the matrices they share.

    A group has as many replicas as make a step shortest by `useful_copies`. The other replicas form groups of their own
    and repeat the work. For example, of 64 replicas of 10 equal matrices at most 10 have something to do. A larger
    group would not make the step shorter, but would send each result to more ranks.
    """
    copied = [matrix for matrix in matrices if matrix.shards.copies > 1]
    work, largest = sum(matrix.work for matrix in copied), max(copied, key=lambda m: m.cost, default=None)
    groups: dict[Ranks, list[Matrix]] = {}
    counts: dict[Layout, int] = {}
    for shards, alike in itertools.groupby(matrices, lambda matrix: matrix.shards):
        members, layout, copies = list(alike), shards.layout, shards.copies
        if copies > 1 and layout not in counts:
            size = largest.rows * largest.cols
            counts[layout], _ = useful_copies(work, largest.cost, size, members[0].ranks_per_copy, copies)
        if counts.get(layout, copies) < copies:
            layout = replica_subset(layout, counts[layout], rank)
            members = [replace(matrix, shards=shards_of(shards.view, layout)) for matrix in members]
        groups.setdefault(layout.mesh.members, []).extend(members)
    return groups


@functools.lru_cache(maxsize=2**16)
def replica_subset(layout: Layout, count: int, rank: int) -> Layout:
    """Return the layout of `count` replicas: the aligned run of copies with `rank`'s. `count` divides their number."""
    copies = layout.ranks_by_copy(layout.mesh.ranks)
    number = next(number for number, ranks in enumerate(copies) if rank in ranks)
    chosen = copies[number - number % count :][:count]
    sharded = [(size, split) for size, split in zip(layout.mesh.shape, layout.splits) if split is not None]
    mesh = mesh_of((count, *(size for size, _ in sharded)), tuple(member for copy in chosen for member in copy))
    return Layout(layout.shape, mesh, (None, *(split for _, split in sharded)))


def _chunk(messages: Messages, rank: int, chunk_bytes: Optional[int]) -> Chunk:
    """Return the chunk with these messages, and what `rank` does of it as an owner: alone, and in teams."""
    positions = {matrix: i for i, matrix in enumerate(messages.owner.matrices)}

    def owned(batch: Batch) -> OwnedBatch:
        return _owned_batch(batch, tuple(positions[matrix] for matrix in batch.matrices), messages.owner)

    alone = [matrix for matrix in messages.owner.matrices if matrix.team_size == 1]
    shared = [each for each in messages.assignments if len(each.workers) > 1 and rank in each.workers]
    teams = [team_of(each.matrix, each.workers) for each in shared]
    return Chunk(
        messages,
        tuple(tuple(map(owned, chain)) for chain in chains(plan_batches(alone, chunk_bytes), chunk_bytes)),
        tuple((team, owned(team.batch) if team.owner == rank else None) for team in teams),
        listed(names_of_parameters(each.matrix for each in messages.assignments)),
    )


def _owned_batch(batch: Batch, positions: tuple[int, ...], side: OwnerSide) -> OwnedBatch:
    """Return a batch of an owner, whose matrices have `positions` among all of the owner's, and where parts are."""
    in_batch = {position: i for i, position in enumerate(positions)}
    parts = [(in_batch[part.position], part) for part in side.parts if part.position in in_batch]
    came = [(i, part) for i, part in parts if part.gathered is not None]
    with_weights = came if batch.first.parameter.keeps_norm else ()
    return OwnedBatch(
        batch,
        positions,
        blocks_in=blocks_of((i, part.part, part.gathered.elements) for i, part in came),
        blocks_out=blocks_of((i, part.part, part.scattered.elements) for i, part in parts),
        moments_in=blocks_of((i, part.moments, part.gathered.moments) for i, part in came),
        moments_out=blocks_of((i, part.moments, part.scattered.moments) for i, part in parts),
        weights_in=blocks_of((i, part.part, part.gathered.weights) for i, part in with_weights),
    )
