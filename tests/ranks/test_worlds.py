"""A process group is destroyed and another one made, as after a restart: groups are the new ones, and steps go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.ranks.test_unlike_ranks import give_gradients, on_mesh, random
from tests.support.refusals import error_of


def enter_another_world(store: str, backwards: bool = False) -> None:
    """All ranks leave the world together: one that left early would break the connections that others still make."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    rank = size - 1 - rank if backwards else rank
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)


def names_of_groups_in_two_worlds(kernel, folder: str):
    """Return the names in both worlds, and what torch calls a group that another thread makes meanwhile."""
    process_groups, names, others = kernel.plan.process_groups, [], []
    for world in range(2):
        with process_groups._named_by_ranks((0, 1)), ThreadPoolExecutor(1) as thread:
            names.append(distributed_c10d._process_group_name(None, None))
            others.append(thread.submit(distributed_c10d._process_group_name, [0, 1], False).result())
        enter_another_world(f"{folder}/{world}")
    return names, others


def names_of_groups_that_two_threads_make(kernel) -> list[str]:
    """A thread begins to make a group while this one makes another, and ends after it; return all names seen.

    They are the name of the first, of the second while the first is there, of the second alone, and of one that each
    thread makes afterwards.
    """
    named = kernel.plan.process_groups._named_by_ranks
    first, second = named((0, 1)), named((0, 2))

    def name_here() -> str:
        return distributed_c10d._process_group_name([0, 3], False)

    with ThreadPoolExecutor(1) as thread:
        first.__enter__()
        thread.submit(second.__enter__).result()
        names = [name_here(), thread.submit(name_here).result()]
        first.__exit__(None, None, None)
        names.append(thread.submit(name_here).result())
        thread.submit(second.__exit__, None, None, None).result()
        return [*names, name_here(), thread.submit(name_here).result()]


def test_two_threads_make_groups_at_once(fresh_pool):
    """Whichever ends first, each group has the name of its ranks, and torch names what is made afterwards."""
    for first, second, second_alone, *afterwards in fresh_pool.run(names_of_groups_that_two_threads_make):
        assert first.startswith("optimizer_") and second.startswith("optimizer_") and first != second == second_alone
        assert not any(name.startswith("optimizer_") for name in afterwards)


def groups_of_meshes_in_two_worlds(kernel, folder: str) -> list[bool]:
    """Return whether the group of a mesh's ranks is that of the mesh, in each world.

    Old optimizers go on, and ones that have been made in the first world begin in the second.
    """
    flags, old, groups = [], [], []
    for world in range(2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
        groups.append(mesh.get_group())  # which is kept by whoever has asked for it
        params = [on_mesh(random(12, 8, seed=0), Shard(0), mesh) for _ in range(2)]
        new, late = [(kernel.Muon([("up.weight", p)]), p) for p in params]
        for optimizer, p in (new, *old):
            give_gradients([p], world)
            optimizer.step()
        old += [new, late]
        flags.append(kernel.plan.process_groups.group_of(tuple(mesh.mesh.tolist())) is mesh.get_group())
        enter_another_world(f"{folder}/{world}")
    return flags


def test_the_groups_of_a_mesh_are_found_again_after_a_restart(fresh_pool, tmp_path):
    """Otherwise a process that is new in the second world would wait for the others in the mesh's own group."""
    assert fresh_pool.run(groups_of_meshes_in_two_worlds, str(tmp_path)) == [[True, True]] * 4


def errors_in_another_world(kernel, store: str) -> str | None:
    """Return the error of the first step in a new world, after one with unlike rates that nobody has read."""
    rank = dist.get_rank()
    with mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False):
        for rates in ((0.1, 0.1 + rank), (0.1,)):
            p, exchange = nn.Parameter(random(12, 8, seed=0)), kernel.ExchangeOptions(process_group=dist.group.WORLD)
            optimizer = kernel.Muon([("up.weight", p)], exchange=exchange)
            for step, rate in enumerate(rates):
                optimizer.param_groups[0]["lr"] = rate
                give_gradients([p], step)
                error = error_of(optimizer.step)
            if len(rates) == 2:
                enter_another_world(store)
        return error


def test_a_process_that_takes_part_from_the_second_world_on_finds_the_groups(fresh_pool, tmp_path):
    """It has made none before, so the others must not count those of the first world, nor tell what happened there."""
    for (first, second), others in fresh_pool.run(names_of_groups_in_two_worlds, str(tmp_path)):
        assert first == second and first not in others
    assert fresh_pool.run(errors_in_another_world, str(tmp_path / "third")) == [None] * 4


def steps_as_another_rank(kernel, store: str) -> bool:
    """Ranks have copies, and exchange their work on them; return whether they end as in a process alone."""
    shared, alone = ([nn.Parameter(random(400, 400, seed=i)) for i in range(3)] for _ in range(2))
    names = [f"layers.{i}.up.weight" for i in range(3)]
    exchange = kernel.ExchangeOptions(process_group=dist.group.WORLD)
    optimizers = [kernel.Muon(zip(names, shared), exchange=exchange), kernel.Muon(zip(names, alone))]
    for step in range(2):
        for optimizer, params in zip(optimizers, (shared, alone)):
            give_gradients(params, step)
            optimizer.step()
        if step == 0:
            enter_another_world(store, backwards=True)
    return all(map(torch.equal, shared, alone))


def test_an_optimizer_goes_on_if_its_process_gets_another_rank(fresh_pool, tmp_path):
    """Who owns which matrix follows from ranks. Messages are listed by process, which here has two ranks."""
    assert all(fresh_pool.run(steps_as_another_rank, str(tmp_path / "store"), agreeing=False))
