"""Which indices a rank holds of a DTensor: those that DTensor itself gives it, at ranks that need not exist.

State is placed as its parameter is, and placements with which a step cannot work raise.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext as accepted

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support import inside
from tests.support.pieces import mesh_of
from tests.support.random_plans import indices
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, part_of


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
    placement = kernel.plan.layout
    for rank in sample:
        fake_ranks(rank, world)
        for layout, size in cases_of_dtensor(world):
            mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=tuple("xyz")[: len(layout.mesh)])
            numbers = torch.arange(size[0] * size[1]).reshape(size)
            dtensor = distribute_tensor(numbers, mesh, layout.placements(), src_data_rank=None)
            rows, cols = map(indices, placement.runs_of(placement.layout_of("w", dtensor), rank))
            part = dtensor.to_local()
            assert part.numel() == len(rows) * len(cols), (rank, layout, size)
            assert torch.equal(part, numbers[rows][:, cols].reshape(part.shape)), (rank, layout, size)


def layouts_of_state(kernel, case: Case):
    """Return whether the state of each parameter lies as it does, before a step and after it."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = kernel.Muon([(spec.name, p) for spec, p in zip(case.specs, params)])
    flags = []
    for _ in range(2):
        for p in params:
            tensors = [value for key, value in optimizer.state[p].items() if key != "step"]
            flags += [_lies_as(value, p) for value in tensors]
            p.grad = torch.ones_like(p)
        optimizer.step()
    return flags


def _lies_as(value, p) -> bool:
    same = value.placements == p.placements and value.device_mesh == p.device_mesh
    return same and value._local_tensor.shape == p._local_tensor.shape


def test_state_exists_from_the_start_and_is_sharded_alike(pools):
    layouts = list(LAYOUTS.values())
    specs = tuple(Spec(f"layers.{i}.up.weight", (13, 22), layout) for i, layout in enumerate(layouts))
    specs += tuple(Spec(f"layers.{i}.up.bias", (13,), LAYOUTS[name]) for i, name in enumerate(("rows", "hsdp")))
    for flags in pools(4).run(layouts_of_state, Case(specs)):
        assert len(flags) == 2 * (len(layouts) + 2 * 2)
        assert all(flags)


def raised_for(kernel, name, shape, placements, settings):
    local = torch.zeros(shape)
    p = nn.Parameter(DTensor.from_local(local, mesh_of((2,)), placements, run_check=False))
    try:
        kernel.Muon([(name, p)], **settings)
    except ValueError as error:
        return str(error)


def test_partial_parameters_raise(pools):
    for text in pools(2).run(raised_for, "up.weight", (8, 8), [Partial()], {}):
        assert "up.weight" in text
        assert "Partial" in text


@pytest.mark.parametrize("conv_mode", ["flatten", "batched"])
def test_convolution_sharded_along_its_kernel_raises(pools, conv_mode):
    for text in pools(2).run(raised_for, "a.weight", (8, 8, 2, 3), [Shard(2)], {"conv_mode": conv_mode}):
        assert "a.weight" in text
        assert "[2]" in text


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_convolution_is_sharded_along_its_input_only_if_its_columns_are_in_order(kernel, memory_format):
    """Channels last, a part would have some columns of each place of the kernel."""
    value = torch.empty(8, 8, 2, 3, device="meta").to(memory_format=memory_format)
    layout = inside.layout(kernel, value.shape, [2], range(2), [(1, 1)])
    shards = inside.shards(kernel, kernel.parameters.matrices.matrix_view("a.weight", value), layout)
    is_refused = memory_format == torch.channels_last
    with pytest.raises(ValueError, match=r"a\.weight.*\[1\]") if is_refused else accepted():
        kernel.plan.shards.check_shards("a.weight", shards)


@pytest.mark.parametrize("dim", range(4))
def test_a_stack_of_stacks_is_sharded_along_its_first_dimension_or_rows_or_columns(kernel, dim):
    view = inside.matrix_view(kernel, (2, 3, 8, 6), stacked=True)
    layout = inside.layout(kernel, (2, 3, 8, 6), [2], range(2), [(dim, 1)])
    with pytest.raises(ValueError, match=r"experts.w1.* along dimension 1: shard") if dim == 1 else accepted():
        kernel.plan.shards.check_shards("experts.w1", inside.shards(kernel, view, layout))


@pytest.mark.parametrize("channels", [4, 3])
def test_scales_of_8_bit_momentum_are_cut_where_it_is(kernel, channels):
    """Of 3 channels of 256 numbers the first 2 are 4 blocks of 128, but the 6 blocks of all would be cut in halves."""
    shape = (6, channels, 16, 16)
    view, layout = inside.matrix_view(kernel, shape), inside.layout(kernel, shape, [2], range(2), [(1, 1)])
    with pytest.raises(ValueError, match=r"of which rank 0 has 0 to 511") if channels == 3 else accepted():
        kernel.plan.shards.check_blocks("patches.weight", view, layout)
