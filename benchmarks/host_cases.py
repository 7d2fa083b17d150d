"""Models with matrices so small that a step is only the host's work: in one process, or as one of many ranks sees it.

Many ranks means torch's fake process group, in which no other rank exists and collectives return at once. Its
all-to-all would leave data where the receiver expects flags, so it is replaced. Everything received is then 1: as a
flag it says that every rank had a gradient, and as a number it is finite. The sums by which ranks compare their steps
are 0, as if all agreed. Everything else is the package's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

# Square, wide and tall ones, as a transformer has.
SHAPES = ((8, 8), (8, 16), (16, 8), (16, 16), (8, 32))
# The part of such matrices that one of many ranks has when rows are sharded.
ROWS = ((1, 8), (1, 16), (2, 8), (2, 16), (1, 32))
# As many different shapes as in a convolutional network; few of them share a batch.
MANY_SHAPES = tuple((8, 8 + extra) for extra in range(25))
# A chunk of the sharded model has a quarter of its matrices, packed as bfloat16. A model of 34 billion parameters on 64
# ranks has the same number of chunks with the default, 256 MiB.
CHUNK_BYTES = 48 * 1024


class Case(NamedTuple):
    """A number of matrices that have these shapes in turn; over several ranks the shapes are one rank's rows."""

    matrices: int
    shapes: tuple[tuple[int, int], ...] = SHAPES
    ranks: int = 1

    def __str__(self) -> str:
        where = f" over {self.ranks} ranks" if self.ranks > 1 else ""
        shapes = "1 shape" if len(self.shapes) == 1 else f"{len(self.shapes)} shapes"
        return f"{self.matrices} matrices of {shapes}{where}"


CASES = (
    Case(100, SHAPES[:1]),
    Case(100),
    Case(100, MANY_SHAPES),
    Case(400),
    Case(1600),
    Case(4000, ROWS, 64),
)
TINY_CASES = (Case(4), Case(8, ROWS, 4))


def build_optimizer(kernel: ModuleType, case: Case) -> Optimizer:
    """Return Muon over a model with gradients. Several ranks need the group of `imagined_ranks`."""
    mesh = init_device_mesh("cpu", (case.ranks,)) if case.ranks > 1 else None

    def tensor(shape: tuple[int, int]) -> Tensor:
        local = torch.randn(shape)
        return local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    named = []
    for number in range(case.matrices):
        parameter = torch.nn.Parameter(tensor(case.shapes[number % len(case.shapes)]))
        parameter.grad = tensor(case.shapes[number % len(case.shapes)])
        named.append((f"layers.{number}.weight", parameter))
    return kernel.Muon([{"params": named, "use_muon": True}], **_chunks_of(kernel))


def _chunks_of(kernel: ModuleType) -> dict[str, Any]:
    """Return Muon's argument for CHUNK_BYTES. Older builds that are compared know it by its first name."""
    options = getattr(kernel, "ExchangeOptions", None)
    return {"chunk_bytes": CHUNK_BYTES} if options is None else {"exchange": options(chunk_bytes=CHUNK_BYTES)}


@contextmanager
def imagined_ranks(count: int) -> Iterator[None]:
    """Act as the first of `count` ranks, of which no other exists. Load the kernel inside this context."""
    if count == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with (
            mock.patch.object(dist, "all_to_all_single", partial(_receive_ones, dist.all_reduce)),
            mock.patch.object(dist, "all_reduce", partial(_agree, dist.all_reduce)),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _receive_ones(all_reduce: Callable, output: Tensor, *_: object, group=None, async_op: bool = False):
    output.fill_(1.0)
    # The all-reduce makes the object that a collective returns; with a single real rank it changes nothing.
    return all_reduce(output[:1], group=group, async_op=async_op)


def _agree(all_reduce: Callable, values: Tensor, *arguments, **options):
    """Set the sums by which ranks compare their steps to zero, as if they agreed."""
    work = all_reduce(values, *arguments, **options)
    values.zero_()
    return work
