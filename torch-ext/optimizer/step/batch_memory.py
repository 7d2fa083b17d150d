"""Memory on the CPU in which the batches of an optimizer take turns: directions come in, updates go out.

If every batch asked for memory of its own, the C library might give that of one batch back to the system before the
next one asks. Then each batch would wait until the system has cleared new pages for it.
"""

from __future__ import annotations

from typing import NamedTuple, Optional
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..kernels.memory_parts import CACHE_LINE, bytes_of, parts_of
from ..plan.batches import Batch


class Views(NamedTuple):
    """The parts of the memory that one batch uses, until the next batch does: those of `Batch.memory`."""

    directions: Tensor
    factors: Tensor
    squares: Optional[tuple[Tensor, ...]]


class BatchMemory:
    """As much memory as the largest batch so far has taken; it is kept from step to step."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        # By batch, then by count of matrices and by torch's threads, which decide what is worked on together.
        self._views: WeakKeyDictionary[Batch, dict[tuple[int, int], Views]] = WeakKeyDictionary()

    def views(self, batch: Batch, count: int) -> Views:
        """Return the parts for `count` matrices of a batch, with what the last batch has left there."""
        key = count, torch.get_num_threads()
        views = self._views.get(batch, {}).get(key)
        if views is None:
            views = self._cut(batch, count)
            self._views.setdefault(batch, {})[key] = views
        return views

    def _cut(self, batch: Batch, count: int) -> Views:
        parts = batch.memory(count)
        needed = bytes_of(parts, CACHE_LINE)
        if len(self._bytes) < needed:
            self._views.clear()
            self._bytes = self._bytes.new_empty(0)  # freed first, so that both are never held at once
            self._bytes = self._bytes.new_empty(needed)
        directions, factors, *squares = parts_of(self._bytes, parts, CACHE_LINE)
        return Views(directions, factors, tuple(squares) or None)
