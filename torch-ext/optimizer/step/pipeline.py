"""Chunks in turn: while one is worked on, the messages of others are on their way."""

from __future__ import annotations

from collections import deque
from typing import Any, Generator, Iterable, Iterator


def advanced(exchanges: Iterable[Iterable[Generator]], in_flight: int) -> Iterator[list[Any]]:
    """Advance the chunks of each exchange in rounds until all are done; yield the results of those that end in each.

    A chunk is a generator that yields while a message flies. In a round each chunk under way goes on to its next
    message; up to `in_flight` have one on its way while another is worked on. The newest goes first, so that its gather
    and an older one's scatter are hidden. Exchanges follow one another, so messages of two groups are never on their
    way together. Only teams are an exception: all members of a team send its messages in the same order.
    """
    for chunks in exchanges:
        waiting, running = deque(chunks), []
        while waiting or running:
            if waiting and len(running) <= in_flight:
                running.insert(0, waiting.popleft())
            stages = [(chunk, *advance(chunk)) for chunk in running]
            running = [chunk for chunk, goes_on, _ in stages if goes_on]
            yield [result for _, goes_on, result in stages if not goes_on]


def advance(generator: Generator) -> tuple[bool, Any]:
    """Run a generator up to its next `yield`; return True and what it yields, or False and its result."""
    try:
        return True, next(generator)
    except StopIteration as end:
        return False, end.value
