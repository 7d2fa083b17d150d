"""How long a part of a matrix is on the way to its owner and back, and where it lies in a message: integers only.

On the way there a part is its elements of the direction, its second moments where it has some, and its elements of the
parameter where the update depends on that. On the way back it is those of the update, and the new second moments. Each
of these begins at a multiple of 16 bytes.
"""

from __future__ import annotations

import itertools
from typing import Iterable, NamedTuple, Sequence

from .matrix import Matrix
from .process_groups import Ranks

# At multiples of it parts and messages begin: what NCCL and the compiled passes move at once.
ALIGNED_BYTES = 16


class Way(NamedTuple):
    """To the owners, or back: how many elements `ALIGNED_BYTES` are there, and how many second moments."""

    unit: int
    moments: int
    takes_weights: bool  # in the dtype of the direction

    def length(self, size: int, moments: int) -> int:
        """Return how many elements a part takes that has `size` and so many second moments."""
        return self._weights(size, moments) + size if self.takes_weights else self._end_of_moments(size, moments)

    def moments_place(self, place: int, size: int) -> int:
        """Return the place of its second moments, counted in these, where the part itself is at `place`."""
        return (place + padded(size, self.unit)) // self.unit * self.moments

    def weights_place(self, place: int, size: int, moments: int) -> int:
        """Return the place of its elements of the parameter."""
        return place + self._weights(size, moments)

    def _weights(self, size: int, moments: int) -> int:
        return padded(self._end_of_moments(size, moments), self.unit)

    def _end_of_moments(self, size: int, moments: int) -> int:
        return padded(size, self.unit) + -(-moments * self.unit // self.moments) if moments else size


def ways(matrices: Sequence[Matrix]) -> tuple[Way, Way]:
    """Return the ways of matrices of one family, to their owners and back."""
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
    """Return how long the message of each rank is, and the places of each entry's elements and of its flag.

    Entries are (rank, elements), in the order in which they are in their message; one without elements has no flag.
    Each begins at a multiple of `unit` elements.
    """
    ends, flags = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    parts, flags_before = [], []  # where each part is in its message, and how many flags are before its own
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
    """Return the next multiple of `unit`."""
    return -(-elements // unit) * unit
