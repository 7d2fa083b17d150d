"""Optimizers of like and unlike parameters, and copies: ranks that mean different ones are told at once."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_failures import everything
from tests.ranks.test_one_step import MODEL, built, set_gradients
from tests.support.backends import on_every_backend, read_last_step
from tests.support.sharded_models import LAYOUTS, Case, Spec


def two_in_turn(kernel, case: Case, what: str, deferred: bool = False):
    """Two optimizers of like parameters; the last rank may step them in another order, or leave one of them out.

    Returns the first error, its kind, and whether nothing had moved; None without one. Where the result of a message is
    `deferred` it is read as that of a GPU, which is not waited for.
    """
    with mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False) if deferred else nullcontext():
        return two_in_this_turn(kernel, case, what)


def two_in_this_turn(kernel, case: Case, what: str):
    actor, critic = (built(kernel, case) for _ in range(2))
    odd = dist.get_rank() == 3
    for step in range(1, 4):
        order = [actor, critic]
        if odd and what == ("swapped" if step == 1 else "swapped later"):
            order.reverse()
        if odd and what == "skips" and step == 2:
            order = [critic]
        for optimizer, params in order:
            set_gradients(case, params, step)
            before = everything(optimizer, params)
            try:
                optimizer.step()
                read_last_step(optimizer)
            except (RuntimeError, ValueError) as error:
                return type(error).__name__, str(error), all(map(torch.equal, before, everything(optimizer, params)))
    return None


def explained_on_one_rank(kernel, case: Case) -> None:
    """A setting of both is changed, and one rank looks at one of them before anybody takes a step."""
    pairs = [built(kernel, case) for _ in range(2)]
    for step in range(1, 4):
        for _, params in pairs:
            set_gradients(case, params, step)
        if step == 2:
            for optimizer, _ in pairs:
                optimizer.param_groups[0]["ns_steps"] = 3
            if dist.get_rank() == 0:
                pairs[0][0].explain()
        for optimizer, _ in reversed(pairs):
            optimizer.step()


@on_every_backend()
def test_a_rank_may_look_at_one_of_two_like_optimizers(pools):
    specs = (Spec("up.weight", (12, 8), LAYOUTS["rows"]), Spec("up.bias", (12,), LAYOUTS["rows"]))
    pools(4).run(explained_on_one_rank, Case(specs))


@on_every_backend()
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("what", ["swapped", "swapped later", "skips"])
def test_optimizers_of_like_parameters_are_told_apart(pools, what, deferred):
    """An actor and a critic, say, of the same names, shapes and settings."""
    specs = (Spec("up.weight", (12, 8), LAYOUTS["rows"]), Spec("up.bias", (12,), LAYOUTS["rows"]))
    for kind, error, unmoved in pools(4).run(two_in_turn, Case(specs), what, deferred):
        assert kind == "RuntimeError" and unmoved, error
        one, other = re.search(r"rank 0 was in (.*) with plan .*, rank 3 in (.*) with plan", error).groups()
        if what == "swapped":
            assert (one, other) == ("step 1 of new optimizer 0", "step 1 of new optimizer 1")
        else:
            assert one != other and one.startswith("step 2 of optimizer ") and other.startswith("step 2 of optimizer ")
            assert "has taken a step in which the other had an error" not in error  # the hint to load a checkpoint


def unlike_in_turn(kernel):
    """An optimizer of many sets of copies and one of none, of which the last rank leaves the first one out once."""
    cases = Case(MODEL), Case((Spec("up.weight", (12, 8), LAYOUTS["rows"]),))
    pairs = [(case, *built(kernel, case)) for case in cases]
    for step in range(1, 4):
        for case, optimizer, params in pairs[step == 2 and dist.get_rank() == 3 :]:
            set_gradients(case, params, step)
            try:
                optimizer.step()
                read_last_step(optimizer)
            except RuntimeError as error:
                return str(error)
    return None


@pytest.mark.parametrize("pools", ["gloo"], indirect=True)
def test_optimizers_of_unlike_parameters_are_told_apart(pools):
    """Whatever they have to say, the ranks' messages have one length. A GPU may end in a timeout: nobody waits for it
    before the messages that follow, whose lengths differ.
    """
    for error in pools(4).run(unlike_in_turn):
        assert "rank 0 was in step 2" in error and "rank 3 in step 2" in error


@on_every_backend()
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_optimizers_in_one_order_go_on(pools, deferred):
    specs = (Spec("up.weight", (12, 8), LAYOUTS["rows"]), Spec("up.bias", (12,), LAYOUTS["rows"]))
    assert pools(4).run(two_in_turn, Case(specs), "in order", deferred) == [None] * 4


def swapped_copy(kernel, case: Case):
    """An optimizer and a copy of it, which the last rank steps in another order."""
    optimizer, params = built(kernel, case)
    set_gradients(case, params, 1)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    twins = [p for group in twin.param_groups for p in group["params"]]
    set_gradients(case, params, 2)
    set_gradients(case, twins, 3)
    first = twin if dist.get_rank() == 3 else optimizer
    with pytest.raises(RuntimeError) as caught:
        first.step()
        read_last_step(first)
    optimizer.step()
    twin.step()
    return str(caught.value)


@on_every_backend()
def test_a_copy_of_an_optimizer_is_another_one(pools):
    specs = (Spec("up.weight", (12, 8), LAYOUTS["rows"]),)
    for error in pools(4).run(swapped_copy, Case(specs)):
        assert "new optimizer 0" in error and "rank 3" in error


def one_more_on_a_rank(kernel, case: Case):
    """Rank 0 makes one to print it, another rank makes its own twice and keeps an unlike one; training goes on."""
    if dist.get_rank() == 0:
        assert built(kernel, case)[0].explain().rows
    if dist.get_rank() == 1:
        built(kernel, case)
    kept = built(kernel, case._replace(specs=case.specs[:1])) if dist.get_rank() == 1 else None
    for _ in range(2):
        optimizer, params = built(kernel, case)
        for step in (1, 2):
            set_gradients(case, params, step)
            optimizer.step()
    del kept
    return True


@on_every_backend()
def test_optimizers_that_some_ranks_made_and_let_go_do_not_count(pools):
    specs = (Spec("up.weight", (12, 8), LAYOUTS["rows"]), Spec("up.bias", (12,), LAYOUTS["rows"]))
    assert all(pools(4).run(one_more_on_a_rank, Case(specs)))


def numbered_after_others(kernel, case: Case) -> list[int]:
    """Rank 1 has given more optimizers a number than the others, as a process that has been in an earlier world.

    Return the number in each of two steps, and in one with a new plan.
    """
    ranks, numbers = tuple(range(4)), []
    kernel.step.agreement.rank_agreement._NUMBERS[ranks] += dist.get_rank() == 1
    optimizer, params = built(kernel, case)
    for step in (1, 2, 3):
        set_gradients(case, params, step)
        optimizer.param_groups[0]["ns_steps"] = 5 if step < 3 else 4
        optimizer.step()
        numbers.append(optimizer._agreement._registered[ranks].number)
    read_last_step(optimizer)
    return numbers


@on_every_backend()
def test_a_new_optimizer_gets_one_number_on_all_ranks_and_keeps_it(pools):
    results = pools(4).run(numbered_after_others, Case((Spec("up.weight", (12, 8), LAYOUTS["rows"]),)))
    assert len({number for numbers in results for number in numbers}) == 1


def error_beside_a_copy(kernel, case: Case) -> str:
    """Rank 0 keeps a copy of the first optimizer, and then all make a second one."""
    first, params = built(kernel, case)
    set_gradients(case, params, 1)
    first.step()
    kept = copy.deepcopy(first) if dist.get_rank() == 0 else None
    second, params = built(kernel, case)
    set_gradients(case, params, 1)
    with pytest.raises(RuntimeError) as caught:
        second.step()
        read_last_step(second)
    del kept
    return str(caught.value)


@on_every_backend()
def test_a_copy_that_one_rank_keeps_is_hinted_at(pools):
    for error in pools(4).run(error_beside_a_copy, Case((Spec("up.weight", (12, 8), LAYOUTS["rows"]),))):
        assert "make the same optimizers on all ranks, in the same order; copies by copy.deepcopy count, too" in error
