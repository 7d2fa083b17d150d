"""Steps over ranks under autocast and other default dtypes, with lost messages, with parts that no placement has."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.muon.test_surroundings import AROUND
from tests.support.backends import on_every_backend
from tests.support.pieces import put_together
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    assert_same,
    model,
    muon,
    set_gradient_parts,
    sharded,
    train,
    whole_parameter,
)


def train_inside(kernel, case: Case, name: str):
    """As `train`, with each step inside of something."""
    step = kernel.Muon.step

    def inside(optimizer):
        with AROUND[name](device_of_ranks()):
            step(optimizer)

    with mock.patch.object(kernel.Muon, "step", inside):
        return train(kernel, case)


@on_every_backend()
@pytest.mark.parametrize("settings", [{}, {"ns_method": "gram"}, {"sum_gram": True}], ids=str)
@pytest.mark.parametrize("name", AROUND)
def test_steps_over_ranks_have_the_bits_that_they_have_without(pools, name, settings):
    specs = (*model(LAYOUTS["rows"], seed=3), Spec("long.weight", (600, 4), LAYOUTS["rows"]))
    specs += (Spec("norm.bias", (29,), LAYOUTS["rows"]),)
    case = Case(specs, {"ns_dtype": "float32", "chunk_bytes": 900, **settings}, steps=3, missing="everywhere")
    inside, outside = put_together(pools(4).run(train_inside, case, name)), put_together(pools(4).run(train, case))
    for one, other in zip(inside, outside, strict=True):
        assert_same(case, one, other)


def steps_with_a_lost_message(kernel, case: Case):
    """A message of the second step is lost; return the errors of what is called next, and whether a load heals it."""
    params = [sharded(whole_parameter(case, i), spec.layout) for i, spec in enumerate(case.specs)]
    optimizer = muon(kernel, case, params)

    def take_step(step: int) -> None:
        set_gradient_parts(case, params, step)
        optimizer.step()

    take_step(1)
    saved = optimizer.state_dict()
    lost = mock.patch.object(dist, "all_to_all_single", side_effect=RuntimeError("Connection closed by peer"))
    with lost, pytest.raises(RuntimeError, match="Connection closed by peer"):
        take_step(2)
    errors = []
    for refused in (lambda: take_step(2), optimizer.state_dict):
        with pytest.raises(RuntimeError) as caught:
            refused()
        errors.append(str(caught.value))
    optimizer.load_state_dict(saved)
    take_step(2)
    return errors


@on_every_backend()
def test_a_step_whose_message_is_lost_leaves_a_mark(pools):
    for errors in pools(4).run(steps_with_a_lost_message, Case(model(LAYOUTS["rows"], seed=1))):
        assert len(errors) == 2 and all("broke off" in error for error in errors)


def error_on_a_falling_mesh(kernel, rows: int):
    """FSDP2 cuts by the order of ranks in their group, and not by the mesh: return the constructor's error."""
    mesh = DeviceMesh(device_of_ranks(), [3, 1, 0, 2])
    layer = nn.Linear(12, rows, bias=False, device=device_of_ranks())
    fully_shard(layer, mesh=mesh)
    try:
        kernel.Muon(layer.named_parameters())
    except ValueError as error:
        return str(error)
    return None


@on_every_backend()
def test_parts_that_are_not_what_placements_say_raise(pools):
    """Of 11 rows ranks have 3, 3, 3 and 2, in the order of the group: ranks 2 and 3 have each other's count."""
    results = pools(4).run(error_on_a_falling_mesh, 11)
    assert results[:2] == [None, None]
    for rank in (2, 3):
        assert f"weight (11, 12) has a part {(5 - rank, 12) if rank == 3 else (3, 12)} on rank {rank}" in results[rank]
        assert "(3, 1, 0, 2)" in results[rank]


def error_of_ragged_parts(kernel):
    """Parts of 1, 2, 3 and 4 rows, put together by hand."""
    local = torch.ones(1 + dist.get_rank(), 8, device=device_of_ranks())
    mesh = DeviceMesh(device_of_ranks(), [0, 1, 2, 3])
    p = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((10, 8)), stride=(8, 1))
    try:
        kernel.Muon([("up.weight", nn.Parameter(p))])
    except ValueError as error:
        return str(error)
    return None


@on_every_backend()
def test_ragged_parts_raise(pools):
    """Of 10 rows torch.chunk gives 3, 3, 3 and 1."""
    results = pools(4).run(error_of_ragged_parts)
    assert all("from_local" in text and f"rank {rank}" in text for rank, text in enumerate(results) if rank != 2)
    assert results[2] is None


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_backends_without_options_have_groups(kernel, fake_world):
    group = kernel.plan.process_groups.group_of((0, 1, 2), "up.weight")
    assert dist.get_process_group_ranks(group) == [0, 1, 2]
    assert kernel.plan.process_groups.group_of((0, 1, 2)) is group


def test_a_world_bound_to_a_device_is_not_split(kernel, fake_world, monkeypatch):
    """That would be a collective of all ranks. It is bound again afterwards, and after an error."""
    world, device, bound = dist.group.WORLD, torch.device("cuda", 1), []

    def refused(*_, **__):
        bound.append(world.bound_device_id)
        raise RuntimeError("no such rank")

    world.bound_device_id = device
    monkeypatch.setattr(dist, "new_group", refused)
    with pytest.raises(RuntimeError, match="no such rank"):
        kernel.plan.process_groups.group_of((1, 2, 3), "up.weight")
    assert bound == [None] and world.bound_device_id == device


def test_a_destroyed_group_is_named_as_what_is_missing(kernel):
    """A rank without its group counts as rank 0, whose part of uneven shards may be another one."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    shard = DTensor.from_local(torch.ones(3, 6), DeviceMesh("cpu", [0, 1]), [Shard(0)], shape=(7, 6), stride=(6, 1))
    optimizer = kernel.Muon([("up.weight", nn.Parameter(shard))])
    assert optimizer.state_dict()["state"]
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"up\.weight is sharded, and its process group was destroyed"):
        optimizer.state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_parts_of_other_libraries_are_asked_about(kernel, world_size):
    """Orthogonalized alone, the two halves of a matrix differ from the halves of its polar factor."""
    part, whole, bias = (nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4)))
    part.tensor_model_parallel = bias.tensor_model_parallel = True
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with warnings.catch_warnings(record=True) as raised:
            cut = DTensor.from_local(torch.ones(4, 6), DeviceMesh("cpu", [*range(world_size)]), [Shard(0)])
            cut = nn.Parameter(cut)
            cut.tensor_model_parallel = True
            optimizer = kernel.Muon([("cut.weight", cut), ("up.weight", part), ("up.bias", bias)])
            optimizer.add_param_group({"params": [("down.weight", whole)]})
        notes = optimizer.explain().notes
    finally:
        dist.destroy_process_group()
    lines = [str(warning.message) for warning in raised]
    assert len(lines) == world_size - 1 and set(lines) <= set(notes)
    assert all("tensor_model_parallel=True are among Muon's parameters: 1, such as up.weight. " in x for x in lines)


def test_options_that_turn_out_to_change_nothing_are_said_at_the_first_step(kernel):
    """The group of all ranks is None until there is one, as where the optimizer is made first."""
    p = nn.Parameter(torch.ones(4, 6))
    optimizer = kernel.Muon([("up.weight", p)], exchange=kernel.ExchangeOptions(process_group=None))
    p.grad = torch.ones_like(p)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
    finally:
        dist.destroy_process_group()
    (line,) = (str(warning.message) for warning in raised)
    assert line.startswith("exchange=ExchangeOptions() changes nothing. If you wrote process_group=")


def test_stacks_of_experts_are_no_router(kernel):
    """Nor is what one expert has: a gate of its own."""
    stack = torch.empty(384, 2048, 7168, device="meta")
    for name in ("layers.0.experts.gate.weight", "layers.0.experts.gate_up.weight"):
        (row,) = kernel.route([(name, stack)], expert_keys=("experts",)).rows
        assert (row.branch, row.matrices) == ("muon", 384)
    router = kernel.route([("layers.0.gate.weight", torch.empty(384, 7168, device="meta"))]).rows[0]
    assert router.reason == "router:gate"


def test_what_lies_beside_a_parameter_has_its_parts_on_every_rank(kernel, fake_world):
    """By whatever placements; another rank with a part, or one without, is a difference."""

    def on(mesh, *placements):
        size = {"shape": torch.Size((8, 6)), "stride": (6, 1), "run_check": False}
        return DTensor.from_local(torch.ones(8, 6), DeviceMesh("cpu", mesh), placements, **size)

    p, same, less, more = on([0, 1], Replicate()), on([[0], [1]], Replicate(), Shard(0)), [0], [0, 1, 2]
    lies_beside = kernel.plan.layout.lies_beside
    assert lies_beside("state", same, p) and not any(lies_beside("state", on(x, Replicate()), p) for x in (less, more))


def test_a_scalar_of_other_ranks_has_a_layout(kernel, fake_world):
    """Torch gives ranks outside of a mesh an empty part of one dimension."""
    scale = DTensor.from_local(torch.ones(()), DeviceMesh("cpu", [1, 2]), [Replicate()], run_check=False)
    assert scale.to_local().shape == (0,) and kernel.plan.layout.layout_of("scale", scale).shape == ()


def test_layout_joins_neighbours(kernel):
    """Pieces of a dimension that touch are one block, as where it has fewer indices than ranks."""
    layout = kernel.plan.layout.Layout((2, 6), kernel.plan.layout.mesh_of((4,), (0, 1, 2, 3)), ((0, 2),))
    assert kernel.plan.layout.runs_of(layout, 0) == (((0, 2),), ((0, 6),))


def test_layout_gives_ranks_outside_of_the_mesh_nothing(kernel):
    layout = kernel.plan.layout.Layout((8, 6), kernel.plan.layout.mesh_of((2,), (0, 1)), ((0, 1),))
    assert kernel.plan.layout.runs_of(layout, 5) == ((), ())
