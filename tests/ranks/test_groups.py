"""Process groups: ranks meet in them whatever other groups they know, and those that a mesh has are used."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import Case, Layout, Spec, bits_equal, muon, one_thread, part_of

SECONDS = 10.0  # that a group gives a collective: ranks that do not meet fail soon
SHAPE = (384, 400)  # so large that copies are sent


def value(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)).to(device_of_ranks())


def steps_on(kernel, meshes, placements, backwards=False):
    """Take three steps of a parameter on each of the meshes that this rank is in; return whether bits are right.

    A mesh of fewer dimensions has the first of the placements. The optimizer may get the parameters `backwards`.
    """
    params = [nn.Parameter(distribute_tensor(value(i), mesh, placements[: mesh.ndim])) for i, mesh in meshes]
    alone = [nn.Parameter(value(i)) for i, _ in meshes]
    named = [(f"layers.{i}.up.weight", p) for (i, _), p in zip(meshes, params)]
    optimizer, other = kernel.Muon(named[::-1] if backwards else named, ns_steps=2), kernel.Muon(alone, ns_steps=2)
    for step in range(1, 4):
        for (i, mesh), p, q in zip(meshes, params, alone):
            q.grad = value(100 * step + i)
            p.grad = distribute_tensor(q.grad, mesh, placements[: mesh.ndim])
        optimizer.step()
        with one_thread():
            other.step()
    return all(bits_equal(p.full_tensor(), q) for p, q in zip(params, alone))


def pipeline_with_leaders(kernel):
    """Two stages of two ranks, of which the first ranks have a group of their own."""
    mesh = init_device_mesh(device_of_ranks(), (2, 2), mesh_dim_names=("stage", "shard"))
    dist.new_group([0, 2], use_local_synchronization=True)
    return steps_on(kernel, [(dist.get_rank() // 2, mesh["shard"])], [Shard(0)])


def rank_with_a_group(kernel):
    """Rank 0 alone has one more group beside a mesh of three ranks in two dimensions, of which no group has all."""
    # The mesh first: with it second, torch 2.15 hangs while it makes the mesh's groups.
    mesh = DeviceMesh(device_of_ranks(), [[0], [1], [2]])
    dist.new_group([0], use_local_synchronization=True)
    return dist.get_rank() == 3 or steps_on(kernel, [(0, mesh)], [Shard(0), Replicate()])


def both_sub_meshes(kernel):
    """Parameters on rows and on columns of a 2 x 2 mesh."""
    mesh = init_device_mesh(device_of_ranks(), (2, 2), mesh_dim_names=("x", "y"))
    dist.new_group([1], use_local_synchronization=True)
    rank = dist.get_rank()
    return steps_on(kernel, [(rank // 2, mesh["y"]), (2 + rank % 2, mesh["x"])], [Shard(0)])


def copies_with_leaders(kernel):
    """Four copies of which some work together, in groups that no mesh has, where some ranks know more groups."""
    dist.new_group([0, 2], use_local_synchronization=True)
    mesh = init_device_mesh(device_of_ranks(), (4, 1), mesh_dim_names=("copy", "shard"))
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        right = steps_on(kernel, [(i, mesh) for i in range(2)], [Replicate(), Shard(0)])
    return right and new_group.call_count == 1


def like_meshes():
    """Two meshes over the same ranks, whose groups are others, as for dense layers and for experts."""
    meshes = [init_device_mesh(device_of_ranks(), (2, 2), mesh_dim_names=names) for names in (("x", "y"), ("z", "e"))]
    for group in (group for mesh in meshes for group in mesh.get_all_groups()):
        distributed_c10d._set_pg_timeout(timedelta(seconds=SECONDS), group)  # meshes do not take that of the world
    assert meshes[0].get_group("y").group_name != meshes[1].get_group("e").group_name
    return meshes[0], meshes[1]["e"]


def like_meshes_in_another_order(kernel):
    """One rank has its parameters in another order, which is seen only among those of the same ranks."""
    dense, experts = like_meshes()
    meshes = [(2, dense), (dist.get_rank() // 2, experts)]
    return steps_on(kernel, meshes, [Shard(0), Shard(1)], backwards=dist.get_rank() == 1)


def optimizer_on(kernel, mesh, number):
    """Return an optimizer of a parameter without values, and the parameter: nothing is sent."""
    part = torch.zeros(SHAPE[0] // 2, SHAPE[1], device=device_of_ranks())
    p = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
    return kernel.Muon([(f"layers.{number}.up.weight", p)], ns_steps=2), p


def like_mesh_of_a_rank(kernel):
    """One rank has made optimizers on the first mesh, and let them go; all train on the second."""
    dense, experts = like_meshes()
    for is_lone in (True, False, True):
        if is_lone and dist.get_rank() == 0:
            optimizer_on(kernel, dense["y"], 0)
        elif not is_lone:
            optimizer, p = optimizer_on(kernel, experts, 1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return True


def like_mesh_that_a_rank_plans_again(kernel):
    """One of two optimizers is planned again by one rank alone, to the same plan, before the first step."""
    dense, experts = like_meshes()
    pairs = [optimizer_on(kernel, dense["y"], 0), optimizer_on(kernel, experts, 1)]
    if dist.get_rank() == 0:
        for steps in 3, 2:
            pairs[0][0].param_groups[0]["ns_steps"] = steps
            pairs[0][0].explain()
    for optimizer, p in pairs:
        p.grad = torch.ones_like(p)
        optimizer.step()
    return True


def ranks_of_no_mesh(kernel):
    """A group of ranks 0 to 2, beside a leader's group."""
    dist.new_group([0], use_local_synchronization=True)
    kept = kernel.plan.process_groups
    if dist.get_rank() > 2:
        return True
    group = kept.group_of((0, 1, 2), "w")
    total = torch.ones(1, device=device_of_ranks())
    dist.all_reduce(total, group=group)
    return total.item() == 3


@on_every_backend()
@pytest.mark.parametrize(
    "job",
    [
        pipeline_with_leaders,
        rank_with_a_group,
        both_sub_meshes,
        copies_with_leaders,
        like_meshes_in_another_order,
        like_mesh_of_a_rank,
        like_mesh_that_a_rank_plans_again,
        ranks_of_no_mesh,
    ],
    ids=lambda job: job.__name__,
)
def test_ranks_that_know_different_groups_meet(fresh_pool, job):
    assert all(fresh_pool.run(job))


def groups_made(kernel):
    """Return how many groups a step makes whose ranks are those of a dimension of the mesh."""
    mesh = init_device_mesh(device_of_ranks(), (2, 2), mesh_dim_names=("copy", "shard"))
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        right = steps_on(kernel, [(dist.get_rank() // 2, mesh["shard"])], [Shard(0)])
    return right, new_group.call_count


def group_of_a_larger_world(kernel):
    with pytest.raises(RuntimeError, match="ranks 0, 7 share w, and there are only 4 now: make the optimizer anew"):
        kernel.plan.process_groups.group_of((0, 7), "w")


def test_ranks_of_a_larger_world_are_named(fresh_pool):
    fresh_pool.run(group_of_a_larger_world)


@on_every_backend()
def test_a_mesh_has_the_group_already(fresh_pool):
    assert fresh_pool.run(groups_made) == [(True, 0)] * 4


def parameter_elsewhere(kernel):
    """A parameter on a mesh that half of the ranks are in, which half differs by the parameter, and one on all."""
    meshes = [init_device_mesh(device_of_ranks(), (4,))]
    grid = torch.tensor([[0, 1], [2, 3]])
    meshes += [dist.device_mesh.DeviceMesh(device_of_ranks(), row) for row in grid]
    params = [nn.Parameter(distribute_tensor(value(i), mesh, [Shard(0)])) for i, mesh in enumerate(meshes)]
    biases = [nn.Parameter(distribute_tensor(value(i)[:, 0], mesh, [Shard(0)])) for i, mesh in enumerate(meshes)]
    named = [*((f"layers.{i}.up.weight", p) for i, p in enumerate(params))]
    named += [(f"layers.{i}.up.bias", p) for i, p in enumerate(biases)]
    optimizer = kernel.Muon(named)
    here = [True, dist.get_rank() < 2, dist.get_rank() >= 2]
    before = [p.to_local().clone() for p in params]
    for p, bias, is_here in zip(params, biases, here):
        if is_here:
            p.grad, bias.grad = torch.ones_like(p), torch.ones_like(bias)
    optimizer.step()
    optimizer.metrics()
    moved = [not torch.equal(p.to_local(), old) for p, old in zip(params, before)]
    return moved == here, len(optimizer.explain().rows), len(optimizer.state_dict()["state"])


@on_every_backend()
def test_a_parameter_of_other_ranks_is_left_to_them(fresh_pool):
    assert fresh_pool.run(parameter_elsewhere) == [(True, 6, 6)] * 4


def groups_of_the_first_step(kernel, case: Case):
    """Return how many groups `warmup` makes and the first step behind it, and what it has told."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer, told, made = muon(kernel, case, params), [], []
    for call in (lambda: optimizer.warmup(lambda *stage: told.append(stage)), optimizer.step):
        for p in params:
            p.grad = torch.ones_like(p)
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            call()
        made.append(new_group.call_count)
    return made, told


@on_every_backend()
def test_warmup_makes_the_groups_of_the_step(fresh_pool):
    """Four copies of which two work together need a group that no mesh has."""
    layout = Layout((4, 1), ("r", "0"))
    case = Case(tuple(Spec(f"layers.{i}.up.weight", SHAPE, layout) for i in range(2)), {"ns_steps": 1})
    for made, told in fresh_pool.run(groups_of_the_first_step, case):
        assert made == [1, 0]
        assert [done for done, _, _ in told] == list(range(1, told[0][1] + 1))
        assert "connect 4 ranks that share" in told[0][2]
        assert any("connect 2 ranks that exchange" in what for _, _, what in told)
        assert any("384 x 400" in what for _, _, what in told)


def test_objects_travel_by_the_gpu_of_the_parameters(kernel, monkeypatch):
    """Torch would send them by the current one, which is GPU 0 on all ranks of a program that has chosen none."""
    device, groups = torch.device("cuda", 1), kernel.plan.process_groups
    current, used = [0], []

    @contextmanager
    def on(chosen: torch.device):
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(groups, "group_of", lambda ranks, names: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value, group: used.append(current[-1]))
    groups.gathered("a plan", (0, 1), device, "plans")
    assert used == [1] and current == [0]
