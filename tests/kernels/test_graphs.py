"""Capturing a graph leaves the current stream and random numbers as they were, on a simulated GPU and on a real one."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.support.graphs_of_updates import FORBIDDEN, INVALIDATED


class Stream:
    def __init__(self):
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


class Graph:
    def replay(self) -> None:
        pass


class Gpu:
    """Has a current stream. Like torch's, its captures do not give it back if they cannot begin or end.

    It also has a workspace for each stream, from the pool that is recorded to when the stream first needs one. The
    first capture cannot end with `fails="to end"`, and leaves the generator of random numbers captured; nor can the
    second with "to end, twice". Of later ones, which are empty, it warns. Other threads call what a capture may forbid.
    """

    def __init__(self, fails: str | None):
        self.current = self.first = Stream()
        self.device, self.fails, self.broke = 1, fails, False
        self.recorded: list[object] = []
        self.workspaces: dict[Stream, object] = {}
        self.generator_is_captured = False

    def multiply(self) -> object:
        """Return the pool that the workspace of the current stream comes from; None is torch's general one."""
        return self.workspaces.setdefault(self.current, self.recorded[-1] if self.recorded else None)

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: Stream, capture_error_mode: str):
        before, self.current = self.current, stream
        if self.fails == "to begin" or capture_error_mode != "thread_local":
            raise RuntimeError("a capture to this pool is underway, or what another thread has called is forbidden")
        self.recorded.append(object() if pool is None else pool)
        self.generator_is_captured = True
        try:
            yield
        finally:
            if self.fails in ("to end", "to end, twice"):
                self.fails, self.broke = None if self.fails == "to end" else "to end", True
                raise RuntimeError(INVALIDATED)
            if self.broke:
                warnings.warn("The CUDA Graph is empty.", stacklevel=2)
            self.recorded.pop()
            self.current, self.generator_is_captured = before, False

    @contextmanager
    def on(self, device: torch.device):
        before, self.device = self.device, device.index
        yield
        self.device = before

    def end_allocate(self, index: int, pool: object) -> None:
        if pool not in self.recorded:
            raise RuntimeError("not recording to this pool")
        self.recorded.remove(pool)


@pytest.fixture
def gpu(request, kernel, monkeypatch) -> Gpu:
    made = Gpu(getattr(request, "param", None))
    monkeypatch.setattr(kernel.kernels.graphs, "_capture_stream", lambda index: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "device", made.on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    for name in "set_stream", "stream", "graph":
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", made.workspaces.clear, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocate, raising=False)
    return made


def capture(kernel, work) -> object:
    return kernel.kernels.graphs.captured(work, torch.device("cuda", 0))


def test_work_is_captured_on_another_stream(kernel, gpu):
    """On its GPU, which need not be the current one."""
    seen, devices = [], []
    capture(kernel, lambda: seen.append(gpu.current) or devices.append(gpu.device))()
    assert len(seen) == 2 and gpu.first not in seen and gpu.current is gpu.first
    assert devices == [0, 0] and gpu.device == 1


def test_a_device_without_a_number_is_the_current_one(kernel, gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(kernel.kernels.graphs, "_capture_stream", lambda index: asked.append(index) or Stream())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.device)
    for name in "cuda", "cuda:0":
        kernel.kernels.graphs.captured(lambda: None, torch.device(name))
    assert asked == [1, 0]


def test_each_gpu_has_one_stream_for_all_captures(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: [index])
    streams = [kernel.kernels.graphs._capture_stream(index) for index in (98, 99, 98)]
    assert streams == [[98], [99], [98]] and streams[0] is streams[2]


def test_work_before_a_capture_waits_for_the_current_stream_and_that_for_the_work(kernel, gpu):
    """The current stream may still write what the work reads, and reads at once what it has written."""
    seen = []
    capture(kernel, lambda: seen.append((gpu.current, list(gpu.current.waits), list(gpu.first.waits))))
    (stream, *before), (_, *captured) = seen
    assert before == [[gpu.first], []] and captured == [[gpu.first], [stream]]


def test_a_graph_keeps_what_its_work_uses(kernel, gpu):
    """It has the addresses of its tensors, whose memory would else be given to others."""
    used = torch.zeros(2)
    alive, start = weakref.ref(used), capture(kernel, partial(used.add_, 1))
    del used
    gc.collect()
    assert alive() is not None
    del start
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("gpu", ["to end"], indirect=True)
def test_the_graph_of_a_failed_capture_is_kept(kernel, gpu, monkeypatch):
    """Torch's allocator of pinned memory goes on asking it what it records."""
    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(weakref.ref(graph := Graph())) or graph)
    with pytest.raises(RuntimeError, match="captur"):
        capture(kernel, lambda: None)
    gc.collect()
    assert made[0]() is not None


def test_a_graph_has_a_workspace_of_its_pool(kernel, gpu):
    """torch frees workspaces of its general pool when somebody else records a graph, and a replay would write there."""
    used, pools = [], [object(), object()]
    for pool in pools:
        kernel.kernels.graphs.captured(lambda: used.append(gpu.multiply()), torch.device("cuda", 0), pool)
    assert used == [None, pools[0], None, pools[1]] and not gpu.workspaces


@pytest.mark.parametrize("gpu", ["to begin", "to end", "to end, twice"], indirect=True)
def test_a_failed_capture_gives_the_current_stream_back(kernel, gpu):
    with pytest.raises(RuntimeError, match="captur"):
        capture(kernel, lambda: None)
    assert gpu.current is gpu.first and not gpu.recorded and not gpu.workspaces


@pytest.mark.parametrize("gpu", ["to end"], indirect=True)
def test_a_failed_capture_gives_random_numbers_back(kernel, gpu):
    """And says no more than its error."""
    with pytest.raises(RuntimeError, match="captur"), warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(kernel, lambda: None)
    assert not gpu.generator_is_captured


@pytest.mark.parametrize("gpu", ["to end"], indirect=True)
def test_work_that_breaks_its_capture_gives_the_current_stream_back(kernel, gpu):
    calls = []

    def work() -> None:
        calls.append(None)
        if len(calls) == 2:  # the first call is outside the capture
            raise RuntimeError(FORBIDDEN)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(kernel, work)
    assert gpu.current is gpu.first


@pytest.mark.gpu
def test_dropout_and_captures_go_on_after_one_that_broke(kernel):
    """Up to torch 2.11 random numbers would raise, until another capture ended."""
    device, ones = torch.device("cuda", torch.cuda.current_device()), torch.ones(1000, device="cuda")
    with pytest.raises(RuntimeError, match="captur"):
        kernel.kernels.graphs.captured(torch.cuda.synchronize, device)
    assert torch.nn.functional.dropout(ones).isfinite().all()
    start = kernel.kernels.graphs.captured(lambda: ones.add_(1), device)
    before = ones.clone()
    start()
    assert torch.equal(ones, before + 1)
