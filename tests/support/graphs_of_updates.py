"""CUDA graphs of updates in a place: real ones on "cuda", and simulated ones on "cpu", which do the work again.

Like a real graph, a simulated one reads and writes the same memory at each replay. Also the steps that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

SETTINGS = dict(lr=2e-2, weight_decay=0.1)

# Several matrices of a shape, tall ones among them, and a vector. On a GPU: a size whose products are tuned, one that a
# single launch may take, and one of which nothing is measured. Each measurement takes seconds.
SHAPES = {
    "cpu": [(12, 20)] * 3 + [(24, 8)] * 2 + [(20,)],
    "cuda": [(256, 256)] * 3 + [(200, 72)] * 2 + [(150, 300)] + [(20,)],
}

# From the largest block on. Torch's allocator keeps blocks of up to 1 MB apart, in steps of 512 bytes.
BLOCKS = (1 << 24, 1 << 21, 1 << 18, 1 << 14, 1 << 9)


# What torch says where a work does something that its capture forbids, and then where that capture is to end.
FORBIDDEN, INVALIDATED = (
    f"CUDA error: {what}\nCUDA kernel errors might be asynchronously reported at some other API call."
    for what in (
        "operation not permitted when stream is capturing",
        "operation failed due to a previous error during capture",
    )
)


class Graphs:
    """Counts captures and replays in a place."""

    replays = captures = 0

    def __init__(self, place: str, capture: Callable):
        self.place, self._capture = place, capture

    def captured(self, work: Callable[[], object], device: torch.device, pool: object) -> Callable[[], None]:
        """Capture `work` and return what replays it."""
        self.captures += 1
        start = self._capture(work, device, pool)

        def replay() -> None:
            self.replays += 1
            start()

        return replay

    def spoil(self, optimizer) -> None:
        """Put NaN into what graphs share, which each step has to write, and on a GPU into all memory that is free.

        So a graph that reads the memory of a step before, or of a freed tensor, reads NaN.
        """
        for packed in (member for chain in optimizer._graphs._replays.values() for member in chain.members):
            packed.directions.fill_(math.nan)
            packed.take_norms_()  # NaN, too
        if self.place == "cuda":
            spoil_free_memory()


def spoil_free_memory() -> None:
    """Fill the memory with NaN that torch keeps for new tensors on the current GPU, but for that of graphs."""
    taken = []
    for size in BLOCKS:
        reserved = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == reserved:  # until no free block is as large
            taken.append(torch.full((size // 4,), math.nan, device="cuda"))


def simulated_capture(work: Callable[[], object], device: torch.device, pool: object) -> Callable[[], None]:
    """Do `work` once, as a capture does, and return it."""
    work()
    return work


@contextmanager
def counted_graphs(kernel: ModuleType, place: str) -> Iterator[Graphs]:
    """Let warm-ups in a place capture graphs that are counted."""
    graphs = kernel.step.graphs
    counted = Graphs(place, graphs.captured if place == "cuda" else simulated_capture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "captured", counted.captured)
        if place == "cpu":
            patch.setattr(graphs, "can_capture", lambda device: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield counted


def parameters(place: str = "cpu", dtype: torch.dtype = torch.float32) -> list[tuple[str, Parameter]]:
    """Return named parameters of the shapes of a place."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(place, dtype) for shape in SHAPES[place]]
    return [(f"layers.{i}.weight", Parameter(value)) for i, value in enumerate(values)]


def parameters_of(optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def steps(
    optimizer,
    count: int = 3,
    seed: int = 1,
    before: Callable[[int], object] = lambda step: None,
    take: Callable = lambda optimizer: optimizer.step(),
) -> list[Tensor]:
    """Take steps with gradients from a seed, each in new memory; return copies of all parameters and of their state."""
    generator = torch.Generator().manual_seed(seed)
    params = parameters_of(optimizer)
    for step in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        before(step)
        take(optimizer)
    optimizer.state_dict()  # waits for what is on its way to the host
    state = [value for p in params for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [value.detach().cpu().clone() for value in (*params, *state)]


def same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """As bits: the lower halves of split master weights are kept as numbers, some of which are NaN."""
    bits = [[x.reshape(-1).view(torch.uint8) for x in tensors] for tensors in (actual, expected)]
    return len(actual) == len(expected) and all(map(torch.equal, *bits))
