"""What `watched_messages` notices of messages that gloo carries out and NCCL would not, each by one that does it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_pool import JobError
from tests.support.watched_messages import InFlight, Message, check_tensor, check_together

PAIR = (0, 1)


def reduced(group: str, ranks: tuple[int, ...] = PAIR, count: int = 1) -> Message:
    return Message(group, ranks, "all_reduce", (count,))


def exchanged(sent: tuple[int, ...], received: tuple[int, ...]) -> Message:
    return Message("a", PAIR, "all_to_all_single", sent, received)


A, B, C = reduced("a"), reduced("b", (1, 2)), reduced("c", (0, 2))
WRONG = {
    "one is left out": ([[A, A], [A]], r"message 1 of group a was started by \[0\], not by \(0, 1\)"),
    "other kinds": ([[A], [A._replace(kind="all_to_all_single")]], "message 0 of group a is another one on some ranks"),
    "other sizes": ([[A], [reduced("a", count=2)]], "message 0 of group a has unlike sizes"),
    "other parts": ([[exchanged((1, 2), (1, 3))], [exchanged((3, 1), (1, 1))]], "rank 0 sends 2 elements to rank 1"),
    "two groups in two orders": ([[A, reduced("b")], [reduced("b"), A]], "in unlike orders"),
    "three groups in a ring": ([[A, C], [B, A], [C, B]], "in unlike orders"),
}


@pytest.mark.parametrize("lists, words", WRONG.values(), ids=WRONG)
def test_ranks_that_would_wait_for_ever_are_told(lists, words):
    with pytest.raises(AssertionError, match=words):
        check_together(lists)


@pytest.mark.parametrize(
    "lists", [[[A, C], [A, B], [B, C]], [[exchanged((1, 2), (1, 3))], [exchanged((3, 1), (2, 1))]], [[], []]], ids=str
)
def test_messages_in_one_order_pass(lists):
    check_together(lists)


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4).T, torch.zeros(3, dtype=torch.int16)], ids=["strides", "dtype"])
def test_tensors_that_nccl_does_not_send_are_refused(tensor):
    with pytest.raises(AssertionError, match="NCCL sends no"):
        check_tensor(tensor)


class Arrived(dist.Work):
    """A collective that has ended."""

    def wait(self) -> bool:
        return True


def test_what_arrives_is_there_after_the_wait_alone():
    target, leaving = torch.ones(3), torch.ones(2)
    pending = InFlight(Arrived(), target, torch.arange(3.0), (leaving, leaving.clone()))
    assert target.isnan().all()
    pending.wait()
    assert torch.equal(target, torch.arange(3.0))


@pytest.mark.parametrize("which, words", [(0, "what arrives was written to"), (1, "what leaves was changed")])
def test_tensors_that_are_written_to_on_their_way_are_told(which, words):
    tensors = torch.ones(3), torch.ones(2)
    pending = InFlight(Arrived(), tensors[0], torch.zeros(3), (tensors[1], tensors[1].clone()))
    tensors[which][0] = 5.0
    with pytest.raises(AssertionError, match=words):
        pending.wait()


def sends_what_has_strides(kernel) -> None:
    kernel.plan.process_groups.all_reduce_sum_(torch.zeros(2, 3).T, (0, 1), "nothing")


def test_messages_of_the_package_are_watched(pools):
    with pytest.raises(JobError, match="NCCL sends no tensor of shape"):
        pools(2).run(sends_what_has_strides)
