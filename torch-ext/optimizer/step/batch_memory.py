"""Memory on the CPU in which the batches of an optimizer take turns: directions come in, updates go out.

If every batch asked for memory of its own, the C library might give that of one batch back to the system before the
next one asks. Then each batch would wait until the system has cleared new pages for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..plan.batches import Batch

# Each part begins at a multiple of so many bytes: a line of the cache.
_LINE = 64


class Views(NamedTuple):
    """The parts of the memory that one batch uses, until the next batch does: those of `Batch.memory`."""

    directions: Tensor
    factors: Tensor
    squares: Optional[Tensor] = None


class BatchMemory:
    """As much memory as the largest batch so far has taken; it is kept from step to step."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def views(self, batch: Batch, count: int) -> Views:
        """Return the parts for `count` matrices of a batch, with what the last batch has left there."""
        parts = batch.memory(count)
        lengths = [math.prod(size) * dtype.itemsize for size, dtype in parts]
        places = [-(-length // _LINE) * _LINE for length in lengths]
        if len(self._bytes) < sum(places):
            self._bytes = self._bytes.new_empty(0)  # before more is asked for
            self._bytes = self._bytes.new_empty(sum(places))
        cut = zip(self._bytes[: sum(places)].split(places), lengths, parts)
        return Views(*(memory[:length].view(dtype).view(size) for memory, length, (size, dtype) in cut))
