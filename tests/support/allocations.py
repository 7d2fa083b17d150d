"""The memory that tensors take while something runs, counted: what is held, and the most that was held at a time."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Follows each storage that an op returns while it is entered, until it is freed; views and in-place ops have none.

    What an op takes and gives back within itself is not seen.
    """

    def __init__(self):
        super().__init__()
        # Storages may be freed by threads of a process group; to append is atomic.
        self._changes: list[int] = []
        self._alive: set[int] = set()

    @property
    def peak(self) -> int:
        """The most bytes that were held at a time."""
        return max(itertools.accumulate(self._changes), default=0)

    @property
    def held(self) -> int:
        """The bytes that are held."""
        return sum(self._changes)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs | self._alive:
                self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        self._alive.add(storage._cdata)
        self._changes.append(storage.nbytes())
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, count: int) -> None:
        self._alive.discard(key)
        self._changes.append(-count)


def _tensors(values) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
