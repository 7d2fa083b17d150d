"""Ranks that share different parameters with different others, and some of which are at odds."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.backends import on_every_backend, read_last_step
from tests.support.pieces import mesh_of

CHAIN = {"a": (0, 1), "b": (0, 2), "c": (2, 3)}
FROM_OTHERS = "has met an error about what it shares with further ranks"


def overlapping_sets(kernel, odd_steps: tuple[int, ...], steps: int, odd_groups: tuple[int, ...] = (0,), odd: int = 1):
    """A matrix of ranks 0 and 1, and one of 2 and 3, beside a bias of all; in some steps rates differ on an odd rank.

    They are those of `odd_groups`: the matrix is in the first, the bias in the second. Return, for each step that
    raises, its number, the error, and whether the matrix and the bias moved.
    """
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    matrix = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh["y"], [Shard(0)]))
    bias = nn.Parameter(distribute_tensor(torch.randn(8), mesh, [Replicate(), Replicate()]))
    named = [{"params": [("up.weight", matrix)]}, {"params": [("up.bias", bias)]}]
    if len(odd_groups) > 1 and dist.get_rank() % 2:  # only of those that the same ranks share the order is compared
        named.reverse()
    optimizer, errors = kernel.Muon(named, lr=0.1), []
    for step in range(steps):
        matrix.grad, bias.grad = torch.ones_like(matrix), torch.ones_like(bias)
        for number in odd_groups:
            optimizer.param_groups[number]["lr"] = 0.3 if step in odd_steps and dist.get_rank() == odd else 0.1
        before = matrix.to_local().clone(), bias.to_local().clone()
        try:
            optimizer.step()
            read_last_step(optimizer)
        except (ValueError, RuntimeError) as error:
            moved = not torch.equal(matrix.to_local(), before[0]), not torch.equal(bias.to_local(), before[1])
            errors.append((step, str(error), moved))
    optimizer.check_copies()
    return errors


@on_every_backend()
def test_a_dispute_of_some_ranks_leaves_what_others_share_in_step(pools):
    """What all ranks share moves on all of them, what the two at odds share on none."""
    results = pools(4).run(overlapping_sets, (1,), 3)
    for errors in results[:2]:
        ((step, error, moved),) = errors
        assert step == 1 and moved == (False, True) and "'lr': 0.3" in error
    assert results[2:] == [[], []]


@on_every_backend()
def test_ranks_of_a_pair_are_named_by_their_numbers_among_all(pools):
    results = pools(4).run(overlapping_sets, (1,), 3, (0,), 3)
    for ((step, error, moved),) in results[2:]:
        assert step == 1 and moved == (False, True) and "rank 2 had 'lr': 0.1, rank 3 had 'lr': 0.3" in error
    assert results[:2] == [[], []]


def overlapping_sets_as_on_a_gpu(kernel, *arguments):
    with mock.patch.object(kernel.step.agreement.meeting.Meeting, "is_known", False):
        return overlapping_sets(kernel, *arguments)


@on_every_backend()
@pytest.mark.parametrize("job", [overlapping_sets, overlapping_sets_as_on_a_gpu], ids=["at once", "deferred"])
def test_of_two_disputes_at_once_all_hear_theirs(pools, job):
    """Nobody waits for a rank that has heard the other one first."""
    for rank, errors in enumerate(pools(4).run(job, (1,), 3, (0, 1))):
        ((step, error, moved),) = errors
        assert step == 1 and moved == (rank > 1, False)
        assert "for up.bias: rank 0 had" in error and ("for up.weight: rank 0 had" in error) == (rank < 2)


@on_every_backend()
@pytest.mark.parametrize("odd_steps", [(0,), (0, 1)], ids=str)
def test_a_dispute_of_some_ranks_at_their_first_meeting_stops_all_that_share_with_them(pools, odd_steps):
    """As often as they repeat it. Nobody waits for another rank, and once it is mended all take the step together."""
    for rank, errors in enumerate(pools(4).run(overlapping_sets, odd_steps, 3)):
        assert [step for step, *_ in errors] == list(odd_steps)
        assert all(moved == (False, False) for *_, moved in errors)
        assert all(("'lr': 0.3" if rank < 2 else f"shares up.bias {FROM_OTHERS}") in error for _, error, _ in errors)


def joined_later(kernel) -> bool:
    """Ranks add a matrix that they share, after rank 0 has taken one step more with a matrix of its own."""
    alone = nn.Parameter(torch.ones(4, 5))
    optimizer = kernel.Muon([("alone.weight", alone)], lr=0.1)
    for _ in range(2 - dist.get_rank()):
        alone.grad = torch.ones_like(alone)
        optimizer.step()
    shared = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh_of((2,)), [Shard(0)]))
    optimizer.add_param_group({"params": [("shared.weight", shared)]})
    for _ in range(2):
        shared.grad = torch.ones_like(shared)
        optimizer.step()
    return not torch.equal(shared.to_local(), torch.ones_like(shared.to_local()))


@on_every_backend(2)
def test_ranks_count_the_steps_that_they_have_taken_together(pools):
    assert pools(2).run(joined_later) == [True] * 2


def counted_beside_a_dispute(kernel) -> tuple[str, int]:
    """Return the error of the second of three steps, in which rates differ, and how many steps count."""
    p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh_of((2,)), [Shard(0)]))
    optimizer, error = kernel.Muon([("up.weight", p)], lr=0.1), ""
    for step in range(3):
        p.grad = torch.ones_like(p)
        optimizer.param_groups[0]["lr"] = 0.3 if step == 1 and dist.get_rank() == 1 else 0.1
        try:
            optimizer.step()
            read_last_step(optimizer)
        except RuntimeError as raised:
            error = str(raised)
    return error, optimizer._agreement._steps[0, 1]


@on_every_backend(2)
def test_a_step_in_which_ranks_disagreed_does_not_count(pools):
    """It has changed nothing that they share, so a rank that broke it off before has missed nothing."""
    for error, steps in pools(2).run(counted_beside_a_dispute):
        assert "different settings" in error and steps == 2


def read_in_steps(kernel) -> list[bool]:
    """Return whether each of three steps reads what has come of its meeting, for which the host waits for a GPU."""
    meeting, read, flags = kernel.step.agreement.meeting.Meeting, [], []
    result = meeting._result

    def recorded(self):
        read.append(self)
        return result(self)

    p = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh_of((2,)), [Shard(0)]))
    optimizer = kernel.Muon([("up.weight", p)], lr=0.1)
    with mock.patch.object(meeting, "is_known", False), mock.patch.object(meeting, "_result", recorded):
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
            flags.append(optimizer._agreement._meetings[0] in read)
        read_last_step(optimizer)
    return flags


def test_only_the_first_step_waits_for_what_ranks_agree_on(pools):
    """A later one is read by the step behind it."""
    assert pools(2).run(read_in_steps) == [[True, False, False]] * 2


def missed_by_a_pair(kernel) -> list[tuple[str, bool]]:
    """Ranks 0 and 1 do not agree on a plan in the second of three steps; each shares a bias with another rank.

    Returns, of each step, its error, and whether the bias moved.
    """
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    matrix = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh["y"], [Shard(0)]))
    bias = nn.Parameter(distribute_tensor(torch.randn(8), mesh["x"], [Replicate()]))
    optimizer, steps = kernel.Muon([("up.weight", matrix), ("up.bias", bias)], lr=0.1), []
    for step in range(3):
        matrix.grad, bias.grad = torch.ones_like(matrix), torch.ones_like(bias)
        optimizer.param_groups[0]["ns_steps"] = 4 if step == 1 and dist.get_rank() == 0 else 5
        before, error = bias.to_local().clone(), ""
        try:
            optimizer.step()
        except (ValueError, RuntimeError) as raised:
            error = str(raised)
        steps.append((error, not torch.equal(bias.to_local(), before)))
    return steps


def test_a_step_that_only_some_copies_have_taken_is_named_by_the_next_ones(pools):
    for rank, (first, second, third) in enumerate(pools(4).run(missed_by_a_pair)):
        assert first == ("", True)
        assert second[1] == (rank > 1) and ("'ns_steps': 4" in second[0]) == (rank < 2)
        assert "one has taken a step in which the other had an error" in third[0] and not third[1]


def steps_of_a_chain(kernel) -> tuple[str, list[bool]]:
    """Vectors of pairs of ranks, the rate of the last of which differs on rank 3 in the first of two steps.

    Return the error of the first step, and whether each of this rank's vectors moved in each step.
    """
    rank, named = dist.get_rank(), []
    for name, ranks in CHAIN.items():
        vector = distribute_tensor(torch.ones(8), DeviceMesh("cpu", list(ranks)), [Replicate()], src_data_rank=None)
        named.append({"params": [(f"{name}.bias", nn.Parameter(vector))]})
    optimizer, error, moved = kernel.Muon(named, lr=0.1), "", []
    local_vectors = [
        group["params"][0] for group, ranks in zip(optimizer.param_groups, CHAIN.values()) if rank in ranks
    ]
    for step in range(2):
        optimizer.param_groups[-1]["lr"] = 0.3 if step == 0 and rank == 3 else 0.1
        for p in local_vectors:
            p.grad = torch.ones_like(p)
        try:
            optimizer.step()
        except ValueError as raised:
            error = str(raised)
        moved.append(any(bool((p.to_local() != 1).any()) for p in local_vectors))
    return error, moved


def test_an_error_reaches_all_ranks_of_a_chain_of_sets(pools):
    for rank, (error, moved) in enumerate(pools(4).run(steps_of_a_chain)):
        assert ("c.bias" if rank > 1 else FROM_OTHERS) in error
        assert moved == [False, True]
