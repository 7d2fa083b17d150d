"""Runs of consecutive indices: which of a dimension's rows or columns a rank has, in plain numbers."""

from __future__ import annotations

import math
from typing import Optional, Sequence

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


def in_order_of_cuts(splits: Sequence[Optional[tuple[int, int]]], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the splits of a tensor over a mesh of `sizes` in the order in which they cut it.

    `splits` has for each mesh dimension None, or which dimension of the tensor it splits and the factor, as in a
    `Layout`. Each one returned is the mesh dimension, the dimension and the factor. The first mesh dimension cuts
    first, unless its factor is the number of parts into which later ones cut the same dimension. Then it cuts last, and
    no longer needs a factor: so FSDP2 splits the parts of tensor parallelism. If sizes divide evenly, both orders give
    the same parts; of 7 rows on 3 x 2 ranks they do not.
    """
    order: list[tuple[int, int, int]] = []
    for number in reversed([number for number, split in enumerate(splits) if split is not None]):
        dim, factor = splits[number]
        later_parts = math.prod(sizes[later] for later, later_dim, _ in order if later_dim == dim)
        if 1 < factor == later_parts:
            order.append((number, dim, 1))
        else:
            order.insert(0, (number, dim, factor))
    return order
