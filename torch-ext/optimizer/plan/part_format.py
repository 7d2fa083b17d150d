"""How a part of a matrix is written in a message to its owner and back, and where its pieces begin: integers only.

On the way to the owner a part has its elements of the direction, then its second moments if there are any, then its
elements of the parameter if the update depends on them. On the way back it has its elements of the update and the new
second moments. Each of these pieces begins at a multiple of 16 bytes. A message ends with a flag for each of its parts.
"""

from __future__ import annotations

import itertools
from typing import Iterable, NamedTuple, Optional, Sequence

from .matrix import Matrix
from .process_groups import Ranks

# Parts and messages begin at multiples of this, which NCCL and the compiled passes move at once.
ALIGNED_BYTES = 16


class PartSize(NamedTuple):
    """How many elements a part has, and how many second moments."""

    elements: int
    moments: int


class Offsets(NamedTuple):
    """Where the pieces of a part begin in a buffer of messages, and where its flag is."""

    elements: int  # of the direction or the update
    moments: int  # counted in second moments
    weights: int  # the parameter's elements, where they are sent
    flag: int


class LaidOutParts(NamedTuple):
    """The messages with some parts, to or from each rank."""

    lengths: tuple[int, ...]  # of each rank's message
    offsets: list[Optional[Offsets]]  # of each part, in all messages one after the other; None if it does not travel


class PartFormat(NamedTuple):
    """The format of all parts on their way to the owners, or back."""

    unit: int  # how many elements `ALIGNED_BYTES` hold
    moments: int  # how many second moments they hold
    takes_weights: bool  # whether the parameter's elements are sent, too, in the dtype of the direction

    def length(self, size: PartSize) -> int:
        """Return the number of elements that a part takes in a message."""
        return self._weights(size) + size.elements if self.takes_weights else self._end_of_moments(size)

    def offsets(self, start: int, size: PartSize, flag: int) -> Offsets:
        """Return where the pieces are of a part that begins at `start`."""
        moments = (start + padded(size.elements, self.unit)) // self.unit * self.moments
        return Offsets(start, moments, start + self._weights(size), flag)

    def _weights(self, size: PartSize) -> int:
        return padded(self._end_of_moments(size), self.unit)

    def _end_of_moments(self, size: PartSize) -> int:
        elements, moments = size
        return padded(elements, self.unit) + -(-moments * self.unit // self.moments) if moments else elements


def formats(matrices: Sequence[Matrix]) -> tuple[PartFormat, PartFormat]:
    """Return the formats of parts on their way to the owners and back, for matrices of one family."""
    if not matrices:
        return PartFormat(1, 1, False), PartFormat(1, 1, False)
    p = matrices[0].parameter
    packed, update, moments = (
        ALIGNED_BYTES // dtype.itemsize for dtype in (p.packed_dtype, p.update_dtype, p.moments_dtype)
    )
    return PartFormat(packed, moments, p.keeps_norm), PartFormat(update, moments, False)


def lay_out(ranks: Ranks, parts: Iterable[tuple[int, Optional[PartSize]]], part_format: PartFormat) -> LaidOutParts:
    """Return how parts are laid out in the messages with `ranks`.

    `parts` are (rank, size), in the order in which they stand in that rank's message. A part that does not travel has
    the size None. No part is empty.
    """
    ends, counts, unit = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0), part_format.unit
    begun = []  # of each part: its rank and size, where it begins in that message, and the number of flags before its
    for rank, size in parts:
        start = padded(ends[rank], unit)
        begun.append((rank, size, start, counts[rank]))
        if size is not None:
            ends[rank] = start + part_format.length(size)
            counts[rank] += 1
    lengths = [padded(ends[rank] + counts[rank], unit) for rank in ranks]
    first = dict(zip(ranks, itertools.accumulate(lengths, initial=0)))  # where each message begins
    offsets = [
        None if size is None else part_format.offsets(first[rank] + start, size, first[rank] + ends[rank] + before)
        for rank, size, start, before in begun
    ]
    return LaidOutParts(tuple(lengths), offsets)


def padded(elements: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `elements`."""
    return -(-elements // unit) * unit
