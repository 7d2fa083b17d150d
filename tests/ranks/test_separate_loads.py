"""Ranks that load a state at different times, or into unlike optimizers: once all have loaded, training goes on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tests.ranks.test_unlike_ranks import give_gradients, on_mesh, random
from tests.support.backends import read_last_step
from tests.support.pieces import mesh_of
from tests.support.refusals import error_of


def errors_where_one_rank_loads_first(kernel) -> tuple[str | None, str | None]:
    """Return the errors after a step between the loads of two ranks, and after one that follows both."""
    p = on_mesh(random(12, 8, seed=0), Shard(0), mesh_of((2,)))
    with mock.patch.object(
        kernel.step.agreement.meeting.Meeting, "is_known", False
    ):  # as on a GPU, which is not waited for
        optimizer = kernel.Muon([("up.weight", p)])
        give_gradients([p], 0)
        optimizer.step()
        saved, errors = optimizer.state_dict(), []
        for loading in (1, 0):
            if dist.get_rank() == loading:
                optimizer.load_state_dict(saved)
            give_gradients([p], 1)
            optimizer.step()
            errors.append(error_of(lambda: read_last_step(optimizer)))
    return tuple(errors)


def test_ranks_that_load_one_after_the_other_go_on_after_the_last_load(pools):
    """A step in which they disagreed does not count on any rank."""
    for between, after in pools(2).run(errors_where_one_rank_loads_first):
        assert between is not None and after is None


def error_after_loads_into_an_old_and_a_new_optimizer(kernel) -> str | None:
    p = on_mesh(random(12, 8, seed=0), Shard(0), mesh_of((2,)))
    optimizer = kernel.Muon([("up.weight", p)])
    for step in range(2):
        give_gradients([p], step)
        optimizer.step()
    saved = optimizer.state_dict()
    if dist.get_rank() == 1:
        optimizer = kernel.Muon([("up.weight", p)])
    optimizer.load_state_dict(saved)
    give_gradients([p], 2)
    return error_of(optimizer.step)


def test_one_rank_may_load_into_a_new_optimizer_and_another_into_its_old_one(pools):
    """The error after a step that broke off leaves that to each rank. A load counts steps from the beginning."""
    assert pools(2).run(error_after_loads_into_an_old_and_a_new_optimizer) == [None, None]


def error_after_a_load(kernel, act: str) -> str | None:
    """Return the error of an act after a step in which rates differed, and a load on all ranks."""
    p = on_mesh(random(12, 8, seed=0), Shard(0), mesh_of((2,)))
    with mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False):
        optimizer = kernel.Muon([("up.weight", p)], lr=0.1)
        saved = optimizer.state_dict()
        for step in range(2):
            give_gradients([p], step)
            optimizer.param_groups[0]["lr"] = 0.1 + step * dist.get_rank()
            optimizer.step()
        optimizer.load_state_dict(saved)
        return error_of(getattr(optimizer, act))


@pytest.mark.parametrize("act", ["step", "check_copies", "warmup"])
def test_a_load_does_not_hide_that_ranks_took_unlike_steps(pools, act):
    for error in pools(2).run(error_after_a_load, act):
        assert "'lr': 1.1" in error
