"""The process group that a user gives is used; others are made by the warm-up, with the timeout of the world."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks.test_teams import FOUR, TEAMS, long_ones, teams_cost_nothing
from tests.support.backends import on_every_backend
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import Case, muon, part_of

SECONDS = 45.0  # that the world gives a collective
SHAPE = (384, 400)  # so large that copies are sent

pytestmark = on_every_backend()


def steps_with_a_given_group(kernel):
    """Pairs of ranks have copies, and a mesh, by which they meet first, has these pairs, too.

    Return how many groups are made, and whether that of a pair is the given one.
    """
    mesh = init_device_mesh(device_of_ranks(), (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
    ranks = tuple(mesh.mesh.tolist())
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    copies = [nn.Parameter(torch.ones(SHAPE, device=device_of_ranks())) for _ in range(2)]  # one for each rank to do
    parts = [nn.Parameter(distribute_tensor(torch.ones(SHAPE), mesh, [Shard(0)]))]
    exchange = kernel.ExchangeOptions(process_group=group)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        optimizers = []
        for params, options in ((copies, exchange), (parts, None)):
            named = [(f"layers.{i}.up.weight", p) for i, p in enumerate(params)]
            optimizers.append(kernel.Muon(named, ns_steps=1, exchange=options))
            for p in params:
                p.grad = torch.ones_like(p)
        for optimizer in reversed(optimizers):
            optimizer.step()
    return new_group.call_count, kernel.plan.process_groups.group_of(ranks) is group


def test_the_given_group_is_used_whatever_groups_meshes_have(fresh_pool):
    assert fresh_pool.run(steps_with_a_given_group) == [(0, True)] * 4


def groups_of_teams(kernel) -> list[int]:
    """Return how many groups `warmup` makes and the first step behind it."""
    case, made = Case(long_ones(FOUR), TEAMS), []
    params = [part_of(case, i) for i in range(len(case.specs))]
    with teams_cost_nothing(kernel):
        optimizer = muon(kernel, case, params)
        for call in (lambda: optimizer.warmup(lambda *_: None, budget=0), optimizer.step):
            for p in params:
                p.grad = torch.ones_like(p)
            with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
                call()
            made.append(new_group.call_count)
    return made


def test_warmup_makes_the_groups_of_teams(fresh_pool):
    assert fresh_pool.run(groups_of_teams) == [[1, 0]] * 4


def timeout_of_a_made_group(kernel) -> timedelta:
    if dist.get_rank() > 2:
        return timedelta(seconds=SECONDS)
    group = kernel.plan.process_groups.group_of((0, 1, 2), "up.weight")
    return group._get_backend(torch.device(device_of_ranks())).options._timeout


def test_a_group_that_is_made_has_the_timeout_of_the_world(fresh_pool):
    """Torch's default is half an hour, for which the others would wait for a rank that has died."""
    assert fresh_pool.run(timeout_of_a_made_group) == [timedelta(seconds=SECONDS)] * 4


def sums_by_two_copies(kernel) -> list[float]:
    """Another copy of this package in the process has made a group of the same ranks, and this one knows of none."""
    groups, sums = kernel.plan.process_groups, []
    for _ in range(2):
        total = torch.ones(1, device=device_of_ranks())
        if dist.get_rank() < 3:
            groups.all_reduce_sum_(total, (0, 1, 2), "sum")
        sums.append(total.item())
        for known in groups._GROUPS, groups._SETTLED, groups._MADE:
            known.clear()
    return sums


def test_two_copies_of_the_package_make_groups_of_the_same_ranks(fresh_pool):
    assert fresh_pool.run(sums_by_two_copies) == [[3.0, 3.0]] * 3 + [[1.0, 1.0]]
