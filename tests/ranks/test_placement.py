"""Which indices a rank holds of a DTensor: those that DTensor itself gives it, at ranks that need not exist.

State is placed as its parameter is, and placements with which a step cannot work raise.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

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
            given = distribute_tensor(numbers, mesh, layout.placements(), src_data_rank=None)
            rows, cols = map(indices, placement.runs_of(placement.layout_of("w", given), rank))
            own = given.to_local()
            assert own.numel() == len(rows) * len(cols), (rank, layout, size)
            assert torch.equal(own, numbers[rows][:, cols].reshape(own.shape)), (rank, layout, size)


def layouts_of_state(kernel, case: Case):
    """Return whether the state of each parameter lies as it does, before a step and after it."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = kernel.Muon([(spec.name, p) for spec, p in zip(case.specs, params)])
    found = []
    for _ in range(2):
        for p in params:
            tensors = [value for key, value in optimizer.state[p].items() if key != "step"]
            found += [_lies_as(value, p) for value in tensors]
            p.grad = torch.ones_like(p)
        optimizer.step()
    return found


def _lies_as(value, p) -> bool:
    same = value.placements == p.placements and value.device_mesh == p.device_mesh
    return same and value._local_tensor.shape == p._local_tensor.shape


def test_state_exists_from_the_start_and_is_sharded_alike(pools):
    layouts = list(LAYOUTS.values())
    specs = tuple(Spec(f"layers.{i}.up.weight", (13, 22), layout) for i, layout in enumerate(layouts))
    specs += tuple(Spec(f"layers.{i}.up.bias", (13,), LAYOUTS[name]) for i, name in enumerate(("rows", "hsdp")))
    for found in pools(4).run(layouts_of_state, Case(specs)):
        assert len(found) == 2 * (len(layouts) + 2 * 2)
        assert all(found)


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


def stepped_with_gradients(kernel, placements, dtype=torch.float32):
    """Return the whole parameters, a matrix and a bias, after a step whose gradients have these placements."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    params = {"up.weight": (8, 6), "up.bias": (8,)}
    for name, shape in params.items():
        parts = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        start, gradient = torch.ones(shape, dtype=dtype), sum(parts)
        p = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)], src_data_rank=None))
        p.grad_dtype = torch.float32
        if placements == [Partial()]:
            p.grad = DTensor.from_local(parts[rank], mesh, placements, run_check=False)
        else:
            p.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        params[name] = p
    before = {name: p.grad.to_local().clone() for name, p in params.items()}
    kernel.Muon(params.items()).step()
    unchanged = all(torch.equal(p.grad.to_local(), before[name]) for name, p in params.items())
    return [p.full_tensor().detach() for p in params.values()], unchanged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placements", [[Partial()], [Replicate()]], ids=str)
def test_gradients_are_brought_to_where_their_parameters_are(pools, placements, dtype):
    """Tensor parallelism gives such ones: of norms in sequence parallelism, and of an embedding cut by rows.

    They are in float32, in which their terms are added.
    """
    expected, _ = pools(2).run(stepped_with_gradients, [Shard(0)], dtype)[0]
    for params, unchanged in pools(2).run(stepped_with_gradients, placements, dtype):
        assert unchanged and all(map(torch.equal, params, expected))


def error_of_a_partial_gradient_on_one_rank(kernel) -> str:
    p = nn.Parameter(distribute_tensor(torch.ones(8), mesh_of((2,)), [Replicate()], src_data_rank=None))
    optimizer = kernel.Muon([("up.bias", p)])
    if dist.get_rank() == 0:
        p.grad = DTensor.from_local(torch.ones(8), mesh_of((2,)), [Partial()], run_check=False)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


def test_a_partial_gradient_on_one_rank_makes_nobody_wait(pools):
    for text in pools(2).run(error_of_a_partial_gradient_on_one_rank):
        assert "of up.bias, ranks [0] had a gradient and ranks [1] had none" in text


UNLIKE = {
    "layouts": (([Partial()], torch.float32), ([Replicate()], torch.float32)),
    "dtypes": (([Partial()], torch.float32), ([Partial()], torch.bfloat16)),
    "one lies like its parameter": (([Partial()], torch.float32), ([Shard(0)], torch.float32)),
    "one is missing": (([Partial()], torch.float32), None),
}


def error_of_unlike_gradients(kernel, forms, steps_before: int) -> tuple[str, bool]:
    """Return the error of a step whose gradient has another form on each rank, and whether it changed the parameter."""
    mesh = mesh_of((2,))
    p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)], src_data_rank=None))
    p.grad_dtype = None  # any
    optimizer = kernel.Muon([("up.weight", p)])
    for form in (*[([Shard(0)], torch.float32)] * steps_before, forms[dist.get_rank()]):
        before, p.grad = p.to_local().clone(), None
        if form is not None:
            p.grad = distribute_tensor(torch.ones(8, 6, dtype=form[1]), mesh, [Replicate()], src_data_rank=None)
            local = p.grad.to_local() if form[0] != [Shard(0)] else torch.ones(4, 6, dtype=form[1])
            p.grad = DTensor.from_local(local, mesh, form[0], run_check=False)
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error), torch.equal(p.to_local(), before)
    return "", False


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("forms", UNLIKE.values(), ids=UNLIKE)
def test_gradients_that_ranks_would_redistribute_in_unlike_ways_make_nobody_wait(pools, forms, steps_before):
    for text, is_unchanged in pools(2).run(error_of_unlike_gradients, forms, steps_before):
        assert "unlike gradients of up.weight: rank 0 had (Partial(sum),) in torch.float32, rank 1 had" in text
        assert is_unchanged


def step_with_a_gradient_on_another_mesh(kernel):
    """Return the error of a step whose gradient is on another mesh, and whether the parameter stayed."""
    p = nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh_of((2,)), [Shard(0)], run_check=False))
    before = p.to_local().clone()
    optimizer = kernel.Muon([("up.weight", p)])
    elsewhere = DTensor.from_local(torch.ones(4, 6), mesh_of((2, 1)), [Shard(0), Replicate()], run_check=False)
    p.grad = elsewhere
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), torch.equal(p.to_local(), before)


def test_a_gradient_on_another_mesh_raises(pools):
    """It raises before anything moves."""
    for text, unmoved in pools(2).run(step_with_a_gradient_on_another_mesh):
        assert "full_tensor()" in text and unmoved
