"""Runs of consecutive indices: which of a dimension's rows or columns a rank has, in plain numbers."""

from __future__ import annotations

# Consecutive indices of one dimension, as (start, stop), in ascending order.
Runs = tuple[tuple[int, int], ...]


def length(runs: Runs) -> int:
    """Return the total number of indices in `runs`."""
    return sum(stop - start for start, stop in runs)


def within(runs: Runs, start: int, stop: int) -> Runs:
    """Return the part of `runs` inside [start, stop), counted from `start`."""
    cut = ((max(a, start) - start, min(b, stop) - start) for a, b in runs)
    return tuple((a, b) for a, b in cut if a < b)


def chunk(runs: Runs, parts: int, index: int) -> Runs:
    """Return the part that `torch.chunk` gives to `index`. The last parts may be short or empty."""
    total = length(runs)
    size = -(-total // parts)
    first, last = min(index * size, total), min((index + 1) * size, total)
    taken, passed = [], 0
    for start, stop in runs:
        a, b = max(first - passed, 0), min(last - passed, stop - start)
        if a < b:
            taken.append((start + a, start + b))
        passed += stop - start
    return tuple(taken)


def joined(runs: Runs) -> Runs:
    """Return the same indices in as few runs as possible."""
    whole: list[tuple[int, int]] = []
    for start, stop in runs:
        if whole and whole[-1][1] == start:
            start = whole.pop()[0]
        whole.append((start, stop))
    return tuple(whole)
