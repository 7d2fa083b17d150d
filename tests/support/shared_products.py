"""Products that batches share on a GPU, shared on a CPU, where their bits can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch

from benchmarks.step_costs import replaced


@contextmanager
def shared_as_on_a_gpu(kernel: ModuleType) -> Iterator[None]:
    """Make batches on a CPU share m x m products as those on a GPU do, each with memory of its own."""
    chain_key, memory = kernel.polar.chains.chain_key, kernel.step.batch_memory

    def views(self, batch, count: int):
        directions, factors, *_ = (torch.empty(size, dtype=dtype) for size, dtype in batch.memory(count))
        return memory.Views(directions, factors, None)

    as_on_gpu = {chain_key: lambda device, iteration: chain_key(torch.device("cuda"), iteration)}
    with replaced(kernel, as_on_gpu), mock.patch.object(memory.BatchMemory, "views", views):
        yield
