"""At the first step, and the first after a load, ranks compare their copies: one alone may have loaded a file."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tests.ranks.test_copies import specs_on
from tests.ranks.test_first_meeting import FROM_OTHERS
from tests.ranks.test_messages import Counted
from tests.support.backends import on_every_backend
from tests.support.refusals import error_of
from tests.support.sharded_models import LAYOUTS, Case, muon, part_of

ADVICE = "load the same files on all ranks, or send the tensors of one rank to the others"
CASES = {"ddp": Case(specs_on(None), shared=True), "hsdp": Case(specs_on(LAYOUTS["hsdp"]))}


def made(kernel, case: Case):
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params, **({"process_group": dist.group.WORLD} if case.shared else {}))
    return optimizer, params


def step(optimizer, params) -> str | None:
    for p in params:
        p.grad = torch.ones_like(p)
    return error_of(optimizer.step)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def other_weights(kernel, case: Case):
    """Rank 3 has another weight at first; return the errors of two steps and whether the first moved anything."""
    optimizer, params = made(kernel, case)
    weight = local(params[0].detach())
    equal = weight.clone()
    weight.add_(float(dist.get_rank() == 3))
    before = [local(p.detach()).clone() for p in params]
    first = step(optimizer, params)
    moved = not all(map(torch.equal, before, [local(p.detach()) for p in params]))
    repeated = step(optimizer, params)
    weight.copy_(equal)
    return first, moved, repeated, step(optimizer, params)


@on_every_backend()
@pytest.mark.parametrize("name", CASES)
def test_other_weights_on_one_rank_stop_the_first_step_until_they_are_mended(pools, name):
    for first, moved, repeated, mended in pools(4).run(other_weights, CASES[name]):
        assert "up.weight differs between ranks" in first and "[3]" in first and ADVICE in first
        assert not moved and repeated == first and mended is None


def loaded_on(kernel, case: Case, ranks: tuple[int, ...]):
    """Load, on some ranks, what another optimizer has after a step; return the error of the next step."""
    trained, params = made(kernel, case)
    assert step(trained, params) is None
    fresh = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = muon(kernel, case, fresh, **({"process_group": dist.group.WORLD} if case.shared else {}))
    if dist.get_rank() in ranks:
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    return step(optimizer, fresh)


@on_every_backend()
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2, 3)], ids=str)
def test_a_state_that_one_rank_alone_has_loaded_stops_the_step(pools, name, ranks):
    for error in pools(4).run(loaded_on, CASES[name], ranks):
        if len(ranks) == 4:
            assert error is None
        else:
            assert "momentum_buffer of up.weight differs between ranks" in error and ADVICE in error


def messages_of_steps(kernel, case: Case) -> list[list[str]]:
    """Return the collectives of three steps, with a load before the last."""
    optimizer, params = made(kernel, case)
    messages = []
    for number in range(3):
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with Counted() as counted:
            assert step(optimizer, params) is None
        messages.append([name for name, *_ in counted.calls])
    return messages


def test_steps_in_between_compare_nothing(pools):
    for first, second, loaded in pools(4).run(messages_of_steps, CASES["ddp"]):
        assert second == ["all_reduce"]  # by which ranks agree about settings
        assert len(first) == len(loaded) > 1


def odd_pair(kernel):
    """Vectors of ranks 0 and 1, 0 and 2, and 2 and 3; that of the last pair differs. Return the first step's error."""
    named = []
    for name, ranks in {"a": (0, 1), "b": (0, 2), "c": (2, 3)}.items():
        mesh, values = DeviceMesh("cpu", list(ranks)), torch.full((8,), float(name == "c" and dist.get_rank() == 3))
        named.append((f"{name}.bias", nn.Parameter(DTensor.from_local(values, mesh, [Replicate()], run_check=False))))
    optimizer = kernel.Muon(named)
    local_vectors = [p for (_, p), ranks in zip(named, ((0, 1), (0, 2), (2, 3))) if dist.get_rank() in ranks]
    return step(optimizer, local_vectors)


class Done:
    """An event that the host may wait for."""

    def synchronize(self) -> None:
        pass


def as_on_a_gpu(kernel):
    """Return a patch by which what ranks say at a meeting is known only to those that ask for it."""
    meeting = kernel.step.agreement.meeting.Meeting
    overflow = meeting.overflow

    def later(self, scaling):
        result = overflow(self, scaling)
        self._sums._copied = Done()
        return result

    return mock.patch.object(meeting, "overflow", later)


def loaded_halfway(kernel, case: Case):
    """Rank 0 alone loads its state between two steps; return the errors of this step and the next, and what moved."""
    optimizer, params = made(kernel, case)
    with as_on_a_gpu(kernel):
        assert step(optimizer, params) is None
        if dist.get_rank() == 0:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = [local(p.detach()).clone() for p in params]
        errors = [step(optimizer, params), step(optimizer, params)]
        return errors, not all(map(torch.equal, before, [local(p.detach()) for p in params]))


@pytest.mark.parametrize("name", CASES)
def test_a_load_of_one_rank_between_steps_is_said_where_nothing_waits_for_a_gpu(pools, name):
    """The ranks that have compared copies before do not wait for the one that has not."""
    for (first, second), moved in pools(4).run(loaded_halfway, CASES[name]):
        assert first is None and "the ranks did not take the same step" in second and "step 1" in second
        assert not moved


def first_step_without(kernel, case: Case):
    """Rank 3 lacks a gradient in the first step; return the errors of three steps, the last with all gradients."""
    optimizer, params = made(kernel, case)
    with as_on_a_gpu(kernel):
        for p in params[dist.get_rank() == 3 :]:
            p.grad = torch.ones_like(p)
        errors = [error_of(optimizer.step)]
        return [*errors, step(optimizer, params), step(optimizer, params)]


def test_a_gradient_that_one_copy_lacks_in_the_first_step_is_said_at_the_next(pools):
    for first, second, third in pools(4).run(first_step_without, CASES["ddp"]):
        assert first is None and "ranks [0, 1, 2] had a gradient and ranks [3] had none" in second and third is None


def beside_what_may_differ(kernel, case: Case):
    """Each rank has values of its own in a frozen parameter and in an entry that wrappers keep; return the error."""
    optimizer, params = made(kernel, case)
    frozen = nn.Parameter(torch.full((8, 6), float(dist.get_rank())), requires_grad=False)
    optimizer.add_param_group({"params": [("base.up.weight", frozen)]})
    optimizer.state[params[0]]["tokens_seen"] = torch.tensor(dist.get_rank())
    return step(optimizer, params)


def test_what_no_step_changes_may_differ(pools):
    assert pools(4).run(beside_what_may_differ, CASES["ddp"]) == [None] * 4


@pytest.mark.filterwarnings("ignore:Muon has no matrix")
def test_an_error_reaches_ranks_whose_copies_are_equal(pools):
    """They would wait for the others in their step."""
    for rank, error in enumerate(pools(4).run(odd_pair)):
        assert ("c.bias differs between ranks" if rank > 1 else FROM_OTHERS) in error


def local_mistakes(kernel, deferred: bool):
    """Vectors of ranks 0 and 1, and 1 and 2: the first ones differ, and rank 2 has no gradient of the second.

    Return the errors of the first step, and of the next one when both mistakes are mended.
    """
    with as_on_a_gpu(kernel) if deferred else nullcontext():
        return errors_of_local_mistakes(kernel)


def errors_of_local_mistakes(kernel):
    named, rank = [], dist.get_rank()
    for name, ranks in {"a": (0, 1), "b": (1, 2)}.items():
        mesh, values = DeviceMesh("cpu", list(ranks)), torch.full((8,), float(name == "a" and rank == 1))
        named.append((f"{name}.bias", nn.Parameter(DTensor.from_local(values, mesh, [Replicate()], run_check=False))))
    optimizer = kernel.Muon(named)
    local_vectors = [p for (_, p), ranks in zip(named, ((0, 1), (1, 2))) if rank in ranks]
    for p in [] if rank == 2 else local_vectors:
        p.grad = torch.ones_like(p)
    first = error_of(optimizer.step)
    local(named[0][1].detach()).zero_()
    return first, step(optimizer, local_vectors)


@pytest.mark.filterwarnings("ignore:Muon has no matrix")
@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_two_mistakes_at_once_make_nobody_wait(pools, deferred):
    """The rank that both concern says the first; the one that it tells has an error, too. No later step says more."""
    (first, *_), (middle, *_), (last, *_) = results = pools(3).run(local_mistakes, deferred)
    assert "a.bias differs between ranks" in first == middle and FROM_OTHERS in last
    assert [mended for _, mended in results] == [None] * 3


def copies_added_later(kernel, case: Case):
    """Ranks 0 and 1 add a vector of which they have unlike copies; return the errors of that step and the next."""
    optimizer, params = made(kernel, case)
    assert step(optimizer, params) is None
    added, mesh = [], DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        values = torch.full((8,), float(dist.get_rank()))
        added = [nn.Parameter(DTensor.from_local(values, mesh, [Replicate()], run_check=False))]
        optimizer.add_param_group({"params": [("added.bias", *added)]})
    first = step(optimizer, [*params, *added])
    for p in added:
        local(p.detach()).zero_()
    return first, step(optimizer, [*params, *added])


def test_a_step_that_only_some_ranks_have_taken_is_said_at_the_next(pools):
    """Ranks 2 and 3 have taken it: what they share with the others differs from then on."""
    for rank, (first, second) in enumerate(pools(4).run(copies_added_later, CASES["hsdp"])):
        assert first is None if rank > 1 else "added.bias differs between ranks" in first
        assert "one has taken a step in which the other had an error" in second
