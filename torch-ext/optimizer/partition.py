"""Costs to owners: who works on what, balanced within each chunk and over all of them."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Hashable, Iterator, NamedTuple, Optional, Sequence


class Item(NamedTuple):
    """Work of some cost that lies in so many parts, the largest of this size, at a place; None is everywhere."""

    cost: int
    size: int
    parts: int
    place: Optional[Hashable] = None


def chunks_by_size(items: Sequence[Item], limit: int) -> Iterator[list[int]]:
    """Yield the positions of `items`, of falling cost, in chunks.

    At each place a chunk has sizes that sum to at most `limit`, or as many items as they have parts there. Of equal
    cost, places take turns, so that all have something in a chunk.
    """
    turns: Counter[tuple[int, Optional[Hashable]]] = Counter()
    order = []
    for position, item in enumerate(items):
        order.append((-item.cost, turns[item.cost, item.place], position))
        turns[item.cost, item.place] += 1
    chunk, held = [], _Held()
    for _, _, position in sorted(order):
        if chunk and not held.has_room_for(items[position], limit):
            yield chunk
            chunk, held = [], _Held()
        chunk.append(position)
        held.add(items[position])
    if chunk:
        yield chunk


class _Held:
    """What is held of a chunk at each place."""

    def __init__(self):
        self._sizes: Counter[Optional[Hashable]] = Counter()
        self._counts: Counter[Optional[Hashable]] = Counter()
        self._largest = 0  # of the sizes at single places

    def has_room_for(self, item: Item, limit: int) -> bool:
        own = self._largest if item.place is None else self._sizes[item.place]
        return self._counts[item.place] < item.parts or self._sizes[None] + own + item.size <= limit

    def add(self, item: Item) -> None:
        self._sizes[item.place] += item.size
        self._counts[item.place] += 1
        if item.place is not None:
            self._largest = max(self._largest, self._sizes[item.place])


class Owners:
    """Hands out work of a known cost to the least loaded of `ranks`, the first of equals.

    Within a chunk, given in order of falling cost to everybody, no load exceeds the smallest possible largest one by
    more than a third (Graham, Bounds on multiprocessing timing anomalies, 1969); between chunks it goes by the load in
    total.
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
