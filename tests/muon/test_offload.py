"""State that lives in host memory gives the bits of state that stays, and takes three chunks of the device's."""

import importlib
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_gpu import Unguarded
from tests.support.inside import device_bytes
from tests.support.simulated_streams import Deferred, Event, Noted, Queue

SHAPES = [[(3, 4), (7,), ()], [(16, 16)], [(0, 3), (5,)], [(2, 3, 4)], [(1,), (8, 8)]]
DTYPES = torch.float32, torch.bfloat16, torch.float64


@pytest.fixture(scope="module")
def offload(kernel):
    return importlib.import_module(".parameters.offload", kernel.__name__)


def examples(count=5):
    """Chunks of random tensors of several shapes and dtypes."""
    generator = torch.Generator("cpu").manual_seed(0)
    return [
        [
            torch.randn(shape, generator=generator, device="cpu").to(DTYPES[(i + k) % 3])
            for i, shape in enumerate(shapes)
        ]
        for k, shapes in enumerate(SHAPES[:count])
    ]


def on_host(offload, chunks, device):
    """The same chunks in host memory, as state of parameters on `device` is made there."""
    return [[offload.host_zeros_like(t.to(device)).copy_(t) for t in tensors] for tensors in chunks]


def update_(tensors, step):
    for t in tensors:
        t.mul_(0.75).add_(step + 1)


def bits(chunks):
    return [[t.cpu().contiguous().view(-1).view(torch.uint8).tolist() for t in tensors] for tensors in chunks]


def on_device(host):
    """The chunks that are on the device or on their way to it."""
    return {chunk for chunk in host._held if chunk is not None}


def range_of(tensor):
    """The first byte of a contiguous tensor in its memory, and the one behind its last."""
    first = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return first, first + tensor.numel() * tensor.itemsize


def rounded_up(tensors):
    return sum(-(-t.numel() * t.itemsize // 512) * 512 for t in tensors)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("left_out", [(), (1,), (0, 2, 3)], ids=str)
def test_offloaded_state_equals_state_that_stayed(offload, device, count, left_out):
    expected = examples(count=count)
    chunks = on_host(offload, expected, device)
    host = offload.HostChunks(chunks, torch.device(device))
    for step in range(3):
        for k in (k for k in range(count) if step != 1 or k not in left_out):
            with host.borrowed(k) as tensors:
                update_(tensors, step)
            update_(expected[k], step)
    host.synchronize()
    assert bits(chunks) == bits(expected)


def test_at_most_three_chunks_are_on_the_device(offload, device):
    chunks = on_host(offload, examples(), device)
    host = offload.HostChunks(chunks, torch.device(device))
    largest = max(map(rounded_up, chunks))
    assert device_bytes(host) == 3 * largest
    memory, seen = set(), []
    for k in range(len(chunks)):
        with host.borrowed(k) as tensors:
            seen.append(on_device(host))
            memory |= {t.untyped_storage().data_ptr() for t in tensors}
        assert on_device(host) == {k + 1} - {len(chunks)}
    assert len(memory) == 1
    assert seen == [{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4}]


def test_chunks_on_the_device_together_do_not_overlap(offload, device):
    chunks = on_host(offload, examples(), device)
    host = offload.HostChunks(chunks, torch.device(device))
    for k in range(len(chunks) - 2):
        ranges = []
        for j in (k, k + 1, k + 2):
            with host.borrowed(j) as tensors:
                assert all(t.is_contiguous() for t in tensors)
                ranges += [range_of(t) for t in tensors if t.numel()]
        assert all(first % 512 == 0 for first, _ in ranges)
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:]))
        host.synchronize()


def test_one_chunk_takes_one_slot(offload, device):
    (chunk, *_) = on_host(offload, examples(), device)
    assert device_bytes(offload.HostChunks([chunk], torch.device(device))) == rounded_up(chunk)


def test_changes_in_host_memory_count_after_synchronize(offload, device):
    chunks = on_host(offload, examples(), device)
    host = offload.HostChunks(chunks, torch.device(device))
    with host.borrowed(0):  # brings chunk 1 as well
        pass
    host.synchronize()
    for tensors in chunks[:2]:
        for t in tensors:
            t.fill_(3.0)
    for k in range(2):
        with host.borrowed(k) as tensors:
            assert all((t == 3.0).all() for t in tensors)


def test_strided_views_come_contiguous_and_go_back(offload, device):
    whole = offload.host_zeros_like(torch.zeros(6, 4, 3, device=device))
    views = [whole[:, :, i] for i in range(3)]
    host = offload.HostChunks([views[:2], views[2:]], torch.device(device))
    for k in range(2):
        with host.borrowed(k) as tensors:
            for i, t in enumerate(tensors):
                assert t.is_contiguous()
                t.copy_(torch.arange(24.0, device=device).view(6, 4) + 100 * (2 * k + i))
    host.synchronize()
    expected = torch.arange(24.0, device="cpu").view(6, 4, 1) + 100 * torch.arange(3.0, device="cpu")
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.mT, lambda t: t.to(memory_format=torch.channels_last)])
def test_host_zeros_have_the_layout_of_the_tensor(offload, device, layout):
    p = layout(torch.nn.Parameter(torch.ones(2, 4, 3, 5, device=device)))
    zeros = offload.host_zeros_like(p, torch.bfloat16)
    assert zeros.shape == p.shape and zeros.stride() == p.stride() and not zeros.any()
    assert zeros.device.type == "cpu" and zeros.dtype == torch.bfloat16 and not zeros.requires_grad
    assert zeros.is_pinned() == (device == "cuda")


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


def test_an_interrupted_chunk_can_be_borrowed_again(offload):
    momentum = torch.zeros(4)
    host = offload.HostChunks([[momentum]], torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt), host.borrowed(0) as (part,):
        part.add_(1.0)
        raise KeyboardInterrupt
    with host.borrowed(0) as (part,):
        part.add_(1.0)
    assert momentum.tolist() == [1.0] * 4


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
