"""Which indices a rank holds of a DTensor: those that DTensor itself gives it, at ranks that need not exist."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.random_plans import indices
from tests.support.sharded_models import Layout


@pytest.fixture
def fake_ranks():
    """Return a function that makes this process one of many ranks that do not exist."""

    def become(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield become
    dist.destroy_process_group()


def cases_of_dtensor(world: int):
    """Yield layouts of a mesh of so many ranks, and sizes, some of them smaller than a dimension of the mesh."""
    shapes = {8: [(8,), (2, 4), (4, 2), (2, 2, 2)], 96: [(96,), (8, 12), (4, 4, 6)]}[world]
    for shape in shapes:
        strided = [("r",) * (len(shape) - 2) + (f"{dim}/{shape[-1]}", dim) for dim in "01"] if len(shape) > 1 else []
        for splits in [*itertools.product("r01", repeat=len(shape)), *strided]:
            for size in ((16, 8), (7, 5), (3, 11), (1, 4), (21, 10)):
                yield Layout(shape, splits), size


@pytest.mark.parametrize("world, sample", [(8, range(8)), (96, (0, 37, 95))])
def test_rank_holds_what_dtensor_gives_it(kernel, fake_ranks, world, sample):
    placement = kernel.distributed.placement
    for rank in sample:
        fake_ranks(rank, world)
        for layout, size in cases_of_dtensor(world):
            mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=tuple("xyz")[: len(layout.mesh)])
            numbers = torch.arange(size[0] * size[1]).reshape(size)
            given = distribute_tensor(numbers, mesh, layout.placements(), src_data_rank=None)
            rows, cols = map(indices, placement.runs_of(placement.layout_of("w", given), rank))
            own = given.to_local()
            assert own.numel() == len(rows) * len(cols), (rank, layout, size)
            assert torch.equal(own, numbers[rows][:, cols].reshape(own.shape)), (rank, layout, size)
