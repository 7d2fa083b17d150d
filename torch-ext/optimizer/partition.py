"""Costs to owners: who works on what, balanced within each chunk and over all of them."""

from __future__ import annotations

import heapq
from typing import Iterator, Optional, Sequence


def chunks_by_size(costs: Sequence[int], sizes: Sequence[int], limit: int, least: int) -> Iterator[list[int]]:
    """Yield the positions of `costs`, largest first, in chunks whose `sizes` sum to at most `limit`, or of `least`."""
    chunk: list[int] = []
    total = 0
    for position in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        if len(chunk) >= least and total + sizes[position] > limit:
            yield chunk
            chunk, total = [], 0
        chunk.append(position)
        total += sizes[position]
    if chunk:
        yield chunk


class Owners:
    """Hands out work of a known cost to the least loaded of `ranks`, the first of equals.

    Within a chunk, given in order of falling cost, no load exceeds the smallest possible largest one by more than a
    third (Graham, Bounds on multiprocessing timing anomalies, 1969); between chunks it goes by the load in total.
    """

    def __init__(self, ranks: int):
        self.loads = [0] * ranks
        self._in_chunk = [0] * ranks
        self._heap: list[tuple[int, int, int]] = []
        self.next_chunk()

    def next_chunk(self) -> None:
        """Begin a chunk, in which everybody is idle."""
        self._in_chunk = [0] * len(self.loads)
        self._heap = [(0, load, rank) for rank, load in enumerate(self.loads)]
        heapq.heapify(self._heap)

    def take(self, cost: int, candidates: Optional[Sequence[int]] = None) -> int:
        """Return who of `candidates`, None for everybody, takes work of this cost, and count it."""
        if candidates is None:
            while True:  # entries of loads that have grown since are stale
                in_chunk, load, rank = heapq.heappop(self._heap)
                if (in_chunk, load) == (self._in_chunk[rank], self.loads[rank]):
                    break
        else:
            rank = min(candidates, key=lambda r: (self._in_chunk[r], self.loads[r], r))
        self.loads[rank] += cost
        self._in_chunk[rank] += cost
        heapq.heappush(self._heap, (self._in_chunk[rank], self.loads[rank], rank))
        return rank
