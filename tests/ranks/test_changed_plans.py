"""Plans that change after ranks have met, in another way on one of them: errors name what differs."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_failures import everything
from tests.ranks.test_one_step import BIAS, SMALL, built, set_gradients
from tests.support.backends import on_every_backend, read_last_step
from tests.support.sharded_models import LAYOUTS, Case, Spec


def changed_plan_on_a_rank(kernel, case: Case, what: str):
    """One rank changes its plan, or loads its state; return the error, and whether equal plans go on."""
    optimizer, params = built(kernel, case)
    set_gradients(case, params, 1)
    optimizer.step()
    if dist.get_rank() == 2:
        if what == "a setting":
            optimizer.param_groups[0]["ns_steps"] = 3
        else:
            optimizer.load_state_dict(optimizer.state_dict())
    before = everything(optimizer, params)
    set_gradients(case, params, 2)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        optimizer.step()
    unmoved = all(map(torch.equal, before, everything(optimizer, params)))
    optimizer.param_groups[0]["ns_steps"] = 3
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    return str(caught.value), unmoved


@pytest.mark.parametrize("pools", ["gloo"], indirect=True)
@pytest.mark.parametrize("what", ["a setting", "a load"])
def test_a_plan_that_changes_on_one_rank_is_named(pools, what):
    """At once, and not by a timeout; a GPU, whose result is not waited for, may end in one."""
    for error, unmoved in pools(4).run(changed_plan_on_a_rank, Case((SMALL, BIAS)), what):
        assert unmoved and "rank 2" in error
        loaded = "step 1 of new optimizer 0 .*: rank 2 has loaded a state, or has a new optimizer. Do the same on all"
        assert re.search("'ns_steps': 3" if what == "a setting" else loaded, error)


def plans_that_change_unlike(kernel, case: Case) -> tuple[str, bool]:
    """All ranks change the plan with which they have met, rank 2 in another way; as on a GPU, which is not waited for.

    Return the error of the next step, and whether equal plans go on.
    """
    optimizer, params = built(kernel, case)

    def set_steps(count: int, number: int) -> list[torch.Tensor]:
        optimizer.param_groups[0]["ns_steps"] = count
        set_gradients(case, params, number)
        return everything(optimizer, params)

    with mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False):
        set_steps(5, 0)
        optimizer.step()
        before = set_steps(3 if dist.get_rank() == 2 else 4, 1)
        with pytest.raises(ValueError) as caught:
            optimizer.step()
        assert all(map(torch.equal, before, everything(optimizer, params)))
        before = set_steps(4, 2)
        optimizer.step()
        read_last_step(optimizer)
        return str(caught.value), not any(map(torch.equal, before, everything(optimizer, params)))


@on_every_backend()
def test_plans_that_all_ranks_change_in_unlike_ways_are_named_at_once(pools):
    """Though the ranks have met before: with unlike plans they would send messages of unlike lengths."""
    for error, went_on in pools(4).run(plans_that_change_unlike, Case((SMALL,))):
        assert went_on and "rank 2 has" in error and "'ns_steps': 3" in error


def error_of_loaded_momentum(kernel, case: Case) -> str:
    """Rank 1 alone loads momentum in another dtype, which a file keeps."""
    optimizer, params = built(kernel, case)
    set_gradients(case, params, 1)
    saved = optimizer.state_dict()
    if dist.get_rank() == 1:
        for entry in saved["state"].values():
            entry["momentum_buffer"] = entry["momentum_buffer"].to(torch.bfloat16)
    optimizer.load_state_dict(saved)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    return str(caught.value)


@on_every_backend()
def test_momentum_that_ranks_have_loaded_in_several_dtypes_raises(pools):
    """The matrices would travel in chunks of other sizes."""
    for error in pools(4).run(error_of_loaded_momentum, Case((Spec("up.weight", (12, 8), LAYOUTS["rows"]),))):
        assert "momentum in torch.float32" in error and "momentum in torch.bfloat16" in error
