"""Messages between ranks, held to what NCCL asks of them, over gloo, which forgives more.

A rank watches the collectives that the package starts. Each tensor must be contiguous and of a dtype that NCCL sends.
Between start and wait nobody may write to it, or read what arrives: over NCCL the device reads and writes it at some
time in between. What only all ranks together show, `check_together` finds in their lists afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# torch/csrc/cuda/nccl.cpp, `to_nccl_data_type`, without those of 8 bits in floating point.
SENT_BY_NCCL = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
# What a tensor is filled with while something arrives in it: NaN in floating point, -1 or 255 in integers.
POISON = 0xFF


class Message(NamedTuple):
    """A collective as one rank started it."""

    group: str  # its name, the same on all ranks
    ranks: tuple[int, ...]
    kind: str  # function, dtype and operation, in which all ranks agree
    sent: tuple[int, ...] = ()  # elements to each rank, or those that are reduced
    received: tuple[int, ...] = ()  # elements from each rank


class Watch:
    """The messages that `package` has started on this rank, from `start` on."""

    def __init__(self, package: ModuleType):
        self._package = f"{package.__name__}."
        self._messages: list[Message] = []

    def start(self) -> None:
        """Watch until the process ends."""
        watched = {dist.all_reduce: self._all_reduce, dist.all_to_all_single: self._all_to_all}
        watched |= {dist.all_gather_object: self._objects, dist.broadcast_object_list: self._objects}
        for function, method in watched.items():
            mock.patch.object(dist, function.__name__, self._when_of_package(function, method)).start()

    def take(self) -> list[Message]:
        """Return the messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def _when_of_package(self, function: Callable, method: Callable) -> Callable:
        def called(*arguments: Any, **options: Any) -> Any:
            if not sys._getframe(1).f_globals["__name__"].startswith(self._package):
                return function(*arguments, **options)
            return method(function, *arguments, **options)

        return called

    def _objects(self, function: Callable, *arguments: Any, group: dist.ProcessGroup, **options: Any) -> Any:
        self._note(group, function.__name__)
        with _disable_current_modes():  # of a modelled device, to which torch does not bring objects
            return function(*arguments, group=group, **options)

    def _all_reduce(self, function: Callable, values: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        check_tensor(values)
        self._note(options["group"], f"{function.__name__} {values.dtype} {op}", (values.numel(),))
        if not options.get("async_op"):
            return function(values, op, **options)
        arriving = copied(values)
        return InFlight(function(arriving, op, **options), values, arriving)

    def _all_to_all(
        self, function: Callable, incoming: Tensor, outgoing: Tensor, *splits: Sequence[int], **options: Any
    ) -> Any:
        for tensor in (incoming, outgoing):
            check_tensor(tensor)
        group = options["group"]
        received, sent = splits or ([1] * group.size(),) * 2
        self._note(group, f"{function.__name__} {outgoing.dtype} {incoming.dtype}", sent, received)
        if not options.get("async_op"):
            return function(incoming, outgoing, *splits, **options)
        arriving, leaving = copied(incoming), copied(outgoing)
        return InFlight(function(arriving, leaving, *splits, **options), incoming, arriving, (outgoing, leaving))

    def _note(
        self, group: dist.ProcessGroup, kind: str, sent: Sequence[int] = (), received: Sequence[int] = ()
    ) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        self._messages.append(Message(group.group_name, ranks, kind, tuple(sent), tuple(received)))


class InFlight:
    """A collective that has started, over copies: `target` gets what is `arriving` when somebody waits for it."""

    def __init__(self, pending: dist.Work, target: Tensor, arriving: Tensor, left: tuple[Tensor, Tensor] | None = None):
        self._pending, self._target, self._arriving, self._left = pending, target, arriving, left
        with _disable_current_modes():
            bytes_of(target).fill_(POISON)

    def wait(self) -> None:
        """Wait for the collective; AssertionError if somebody has touched its tensors meanwhile."""
        self._pending.wait()
        with _disable_current_modes():
            assert (bytes_of(self._target) == POISON).all(), "what arrives was written to while it was on its way"
            if self._left is not None:
                assert torch.equal(*map(bytes_of, self._left)), "what leaves was changed while it was on its way"
            bytes_of(self._target).copy_(bytes_of(self._arriving))


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, of which modes that count memory or operations do not know."""
    with _disable_current_modes():
        values = values_of(tensor).clone()
    return values if values_of(tensor) is tensor else type(tensor)(values, tensor.device)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, sharing its memory."""
    return values_of(tensor).detach().view(-1).view(torch.uint8)


def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor itself; of one on the modelled device the tensor on the CPU that has its values."""
    return getattr(tensor, "host", tensor)


def check_tensor(tensor: Tensor) -> None:
    """AssertionError unless NCCL sends such tensors."""
    assert tensor.is_contiguous(), f"NCCL sends no tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    assert tensor.dtype in SENT_BY_NCCL, f"NCCL sends no {tensor.dtype}"


def check_together(lists: Sequence[Sequence[Message]]) -> None:
    """Raise AssertionError unless NCCL would carry out the messages that each rank has started, in their order.

    The n-th message of a group is the same for all its members: others would wait for ever, or write past an end. And
    there is one order of all messages that every rank keeps. Ranks that start those of two groups in unlike orders wait
    for each other for ever where a GPU works on one at a time (NCCL's user guide, "Using multiple NCCL communicators
    concurrently").
    """
    numbered = [number_in_groups(messages) for messages in lists]
    of_ranks: dict[tuple[str, int], dict[int, Message]] = {}
    for rank, messages in enumerate(numbered):
        for key, message in messages.items():
            of_ranks.setdefault(key, {})[rank] = message
    for key, by_rank in of_ranks.items():
        _check_members(key, by_rank)
    order = TopologicalSorter({key: () for key in of_ranks})
    for messages in numbered:
        for before, after in pairwise(messages):
            order.add(after, before)
    try:
        order.prepare()
    except CycleError as error:
        raise AssertionError(f"ranks start messages of several groups in unlike orders: {error.args[1]}") from None


def number_in_groups(messages: Iterable[Message]) -> dict[tuple[str, int], Message]:
    """Return messages in their order, by the name of the group and the number of the message in it."""
    counts: dict[str, int] = {}
    numbered = {}
    for message in messages:
        number = counts[message.group] = counts.get(message.group, -1) + 1
        numbered[message.group, number] = message
    return numbered


def _check_members(key: tuple[str, int], by_rank: Mapping[int, Message]) -> None:
    group, number = key
    first, what = next(iter(by_rank.values())), f"message {number} of group {group}"
    assert set(by_rank) == set(first.ranks), f"{what} was started by {sorted(by_rank)}, not by {first.ranks}"
    kinds = {message.kind for message in by_rank.values()}
    assert len(kinds) == 1, f"{what} is another one on some ranks: {sorted(kinds)}"
    if not first.received:
        sizes = {message.sent for message in by_rank.values()}
        assert len(sizes) == 1, f"{what} has unlike sizes: {sorted(sizes)}"
        return
    for a, sender in by_rank.items():
        for b, receiver in by_rank.items():
            left, arrived = sender.sent[first.ranks.index(b)], receiver.received[first.ranks.index(a)]
            assert left == arrived, f"{what}: rank {a} sends {left} elements to rank {b}, which expects {arrived}"
