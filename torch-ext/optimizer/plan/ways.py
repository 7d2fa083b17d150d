"""The length of a matrix part in messages to its owner and back, and the place of each piece in it: integers only.

On the way to the owner a part has its elements of the direction, then its second moments if there are any, then its
elements of the parameter if the update depends on them. On the way back it has its elements of the update and the new
second moments. Each of these pieces begins at a multiple of 16 bytes.
"""

from __future__ import annotations

import itertools
from typing import Iterable, NamedTuple, Sequence

from .matrix import Matrix
from .process_groups import Ranks

# Parts and messages begin at multiples of this, which NCCL and the compiled passes move at once.
ALIGNED_BYTES = 16


class Way(NamedTuple):
    """The way to the owners, or back: how many elements, and how many second moments, fit into `ALIGNED_BYTES`."""

    unit: int
    moments: int
    takes_weights: bool  # whether the parameter's elements are sent, too, in the dtype of the direction

    def length(self, size: int, moments: int) -> int:
        """Return the number of elements that a part of `size` with this many second moments takes in a message."""
        return self._weights(size, moments) + size if self.takes_weights else self._end_of_moments(size, moments)

    def moments_place(self, place: int, size: int) -> int:
        """Return where the second moments of a part at `place` begin, counted in second moments."""
        return (place + padded(size, self.unit)) // self.unit * self.moments

    def weights_place(self, place: int, size: int, moments: int) -> int:
        """Return where the parameter's elements of a part at `place` begin."""
        return place + self._weights(size, moments)

    def _weights(self, size: int, moments: int) -> int:
        return padded(self._end_of_moments(size, moments), self.unit)

    def _end_of_moments(self, size: int, moments: int) -> int:
        return padded(size, self.unit) + -(-moments * self.unit // self.moments) if moments else size


def ways(matrices: Sequence[Matrix]) -> tuple[Way, Way]:
    """Return the way to the owners and the way back for matrices of one family."""
    if not matrices:
        return Way(1, 1, False), Way(1, 1, False)
    p = matrices[0].parameter
    packed, update, moments = (
        ALIGNED_BYTES // dtype.itemsize for dtype in (p.packed_dtype, p.update_dtype, p.moments_dtype)
    )
    return Way(packed, moments, p.keeps_norm), Way(update, moments, False)


def lay_out(
    ranks: Ranks, entries: Iterable[tuple[int, int]], unit: int
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Return the length of each rank's message, and for each entry the place of its elements and of its flag.

    Entries are (rank, elements), in the order in which they stand in that rank's message. An entry without elements has
    no flag. Each entry begins at a multiple of `unit` elements.
    """
    ends, flags = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    parts, flags_before = [], []  # the place of each part in its message, and the number of flags before its flag
    for rank, size in entries:
        parts.append((rank, padded(ends[rank], unit)))
        flags_before.append(flags[rank])
        if size:
            ends[rank] = parts[-1][1] + size
            flags[rank] += 1
    lengths = [padded(ends[rank] + flags[rank], unit) for rank in ranks]
    starts = dict(zip(ranks, itertools.accumulate(lengths, initial=0)))
    places = [starts[rank] + place for rank, place in parts]
    flag_places = [starts[rank] + ends[rank] + before for (rank, _), before in zip(parts, flags_before)]
    return tuple(lengths), places, flag_places


def padded(elements: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `elements`."""
    return -(-elements // unit) * unit
