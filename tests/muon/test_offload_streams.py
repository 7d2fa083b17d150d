"""Offloaded state on simulated streams: whatever runs first, bits stay, and what must be waited for is."""

from __future__ import annotations

import importlib
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_gpu import Unguarded
from tests.muon.test_offload import bits, examples, on_host, update_
from tests.support.simulated_streams import Deferred, Event, Noted, Queue


@pytest.fixture(scope="module")
def offload(kernel):
    return importlib.import_module(".parameters.offload", kernel.__name__)


def test_each_direction_has_a_stream_of_its_own(offload, monkeypatch):
    """On one stream a bus that carries both directions at once would carry one after the other.

    The host goes on while contiguous tensors are copied; of others torch makes a copy first.
    """
    current, copies = Queue(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queue())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda queue: Noted(queue, copies))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, queue: None, raising=False)
    with FakeTensorMode(), Unguarded():
        host = offload.HostChunks([[torch.empty(8, 8), torch.empty(8, 8).mT] for _ in range(5)], torch.device("cuda"))
        for k in range(5):
            with host.borrowed(k):
                pass
    queues = {kind: {queue for queue, to, _ in copies if to == kind} for kind in ("cuda", "cpu")}
    assert (
        len(copies) == 20
        and [overlaps for *_, overlaps in copies] == [True, False] * 10
        and all(len(used) == 1 for used in queues.values())
    )
    assert len({current}.union(*queues.values())) == 3


@pytest.mark.parametrize("seed", range(20))
def test_no_stream_order_changes_a_bit(offload, monkeypatch, seed):
    """The copies of a GPU, simulated: each stream gets on as far as its waits let it, whenever it likes."""
    choice = random.Random(seed)
    incoming, outgoing, current, done = Queue(), Queue(), Queue(), set()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", Deferred)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    expected = examples()
    chunks = on_host(offload, expected, "cpu")
    host = offload.HostChunks(chunks, torch.device("cpu"))
    host._streams = offload._Streams(incoming, outgoing)

    def run(pieces):
        for _ in range(pieces):
            queues = [queue for queue in (incoming, outgoing, current) if queue.work]
            choice.shuffle(queues)
            if not any(queue.runs(done) for queue in queues):
                return

    lag = choice.choice([0, 1, 3, 10])
    for step in range(3):
        for k in choice.sample(range(5), 3) if step == 1 else range(5):
            with host.borrowed(k) as tensors:
                current.work += [("do", lambda t=t, step=step: update_([t], step)) for t in tensors]
            update_(expected[k], step)
            run(lag)
    run(10**6)
    assert not incoming.work and not outgoing.work and not current.work
    assert bits(chunks) == bits(expected)


def test_work_of_a_failed_step_is_done_before_its_slot_is_filled_again(offload, monkeypatch):
    """As if memory ran out while kernels were still queued, and somebody repeated the step."""
    incoming, outgoing, current, done = Queue(), Queue(), Queue(), set()

    def run(*queues):
        while any(queue.work and queue.runs(done) for queue in queues):
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", Deferred)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Queue, "synchronize", lambda queue: run(queue), raising=False)
    momentum, expected = torch.zeros(4), torch.zeros(4)
    host = offload.HostChunks([[momentum]], torch.device("cpu"))
    host._streams = offload._Streams(incoming, outgoing)
    with pytest.raises(MemoryError), host.borrowed(0) as tensors:
        current.work.append(("do", lambda: update_(tensors, 0)))
        raise MemoryError
    with host.borrowed(0) as tensors:
        run(incoming)
        current.work.append(("do", lambda: update_(tensors, 0)))
    run(incoming, current, outgoing)
    update_([expected], 0)
    assert torch.equal(momentum, expected)


def test_copies_in_both_directions_are_waited_for_after_an_error(offload, monkeypatch):
    """Before anybody reads or changes what is in host memory."""
    queues, waited = (Queue(), Queue()), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Queue())
    monkeypatch.setattr(torch.cuda, "stream", Deferred)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Queue, "synchronize", lambda queue: waited.append(queue), raising=False)
    host = offload.HostChunks([[torch.zeros(4)]], torch.device("cpu"))
    host._streams = offload._Streams(*queues)
    with pytest.raises(MemoryError), host.borrowed(0):
        raise MemoryError
    assert waited == [*queues]


def test_both_streams_wait_for_the_memory_and_hold_it(offload, monkeypatch):
    current, recorded, streams = Queue(), [], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(Queue()) or streams[-1])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, queue: recorded.append(queue), raising=False)
    with FakeTensorMode(), Unguarded():
        offload.HostChunks([[torch.empty(8, 8)]], torch.device("cuda"))
    assert recorded == streams
    assert len(streams) == 2
    marks = [what for kind, what in current.work if kind == "record"]
    assert [[what for kind, what in queue.work if kind == "wait"] for queue in streams] == [[mark] for mark in marks]
