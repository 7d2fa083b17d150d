"""From costs to owners: which rank works on which matrix, balanced within each chunk and in total."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from typing import Hashable, Iterator, Optional, Sequence

from .matrix import Matrix


def chunks_by_size(matrices: Sequence[Matrix], everybody: Hashable, limit: int) -> Iterator[list[int]]:
    """Yield the positions of `matrices` in descending cost, cut into chunks.

    A chunk is full when a rank would have parts of more than `limit` elements. But it takes at least as many matrices
    as each is cut into parts, so that each of the ranks that hold these parts can own one. Both are counted for each
    set of holders, since an expert is on some of the ranks; what `everybody` holds counts for all sets. Matrices of
    equal cost alternate between sets of holders, so that no rank idles in a chunk.
    """
    holders = [None if matrix.holders == everybody else matrix.holders for matrix in matrices]
    turns: defaultdict[tuple[int, Optional[Hashable]], Iterator[int]] = defaultdict(itertools.count)
    order = [(-m.cost, next(turns[m.cost, ranks]), i) for i, (m, ranks) in enumerate(zip(matrices, holders))]
    chunk, filling = [], _Filling()
    for _, _, position in sorted(order):
        matrix, ranks = matrices[position], holders[position]
        if chunk and not filling.has_room_for(matrix, ranks, limit):
            yield chunk
            chunk, filling = [], _Filling()
        chunk.append(position)
        filling.add(matrix, ranks)
    if chunk:
        yield chunk


class _Filling:
    """How full a chunk is for each set of holders; None stands for everybody."""

    def __init__(self):
        self._sizes: Counter[Optional[Hashable]] = Counter()
        self._counts: Counter[Optional[Hashable]] = Counter()
        self._largest = 0  # of the sizes for any one set

    def has_room_for(self, matrix: Matrix, holders: Optional[Hashable], limit: int) -> bool:
        with_others = self._largest if holders is None else self._sizes[holders]
        return self._counts[holders] < matrix.parts or self._sizes[None] + with_others + matrix.part_size <= limit

    def add(self, matrix: Matrix, holders: Optional[Hashable]) -> None:
        self._sizes[holders] += matrix.part_size
        self._counts[holders] += 1
        if holders is not None:
            self._largest = max(self._largest, self._sizes[holders])


class Owners:
    """Gives work of a known cost to the least loaded of `ranks`; the first one if several are equal.

    If a chunk's work may go to any rank and comes in descending order of cost, the largest load in it is at most 4/3 of
    the smallest possible (Graham, Bounds on multiprocessing timing anomalies, 1969). Among ranks that are equally
    loaded in the chunk, the one with the smaller total load is taken.
    """

    def __init__(self, ranks: int):
        self.loads = [0] * ranks
        self.next_chunk()

    def next_chunk(self) -> None:
        """Begin a chunk, in which all ranks are idle."""
        # For each rank: its cost in this chunk, its total cost, and its number, which decides between equals.
        self._busy = [(0, load, rank) for rank, load in enumerate(self.loads)]
        self._heap = self._busy[:]
        heapq.heapify(self._heap)

    def take(self, cost: int, candidates: Optional[Sequence[int]] = None) -> int:
        """Return the rank among `candidates` (None: all ranks) that takes work of this cost, and add the cost to it."""
        if candidates is None:
            idlest = heapq.heappop(self._heap)
            while idlest != self._busy[idlest[2]]:  # an outdated entry: the rank has taken work since
                idlest = heapq.heappop(self._heap)
        else:
            idlest = min(map(self._busy.__getitem__, candidates))
        return self._count(cost, idlest[2])

    def take_together(self, cost: int, teams: Sequence[Sequence[int]]) -> list[int]:
        """Return the ranks of the team that is idle first, the least loaded one first, and add `cost` to each of them.

        A team is as busy as its most loaded member.
        """
        team = min(teams, key=lambda members: max(map(self._busy.__getitem__, members)))
        return [self._count(cost, rank) for _, _, rank in sorted(map(self._busy.__getitem__, team))]

    def _count(self, cost: int, rank: int) -> int:
        in_chunk, load, _ = self._busy[rank]
        self.loads[rank] = load + cost
        self._busy[rank] = (in_chunk + cost, load + cost, rank)
        heapq.heappush(self._heap, self._busy[rank])
        return rank
