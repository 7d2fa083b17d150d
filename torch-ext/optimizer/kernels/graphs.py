"""CUDA graphs: work that is recorded once and then started as one launch."""

from __future__ import annotations

import functools
import warnings
from contextlib import suppress
from typing import Any, Callable

import torch


def captured(work: Callable[[], object], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """Run `work` once, record it as a CUDA graph, and return a function that launches the graph.

    The graph's memory comes from `pool`; None makes a new pool. A graph uses the addresses of its capture, so the
    tensors that `work` reads and writes must keep theirs. The current stream stays current, also if a capture fails.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    stream, pool = _capture_stream(index), torch.cuda.graph_pool_handle() if pool is None else pool
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # libraries load kernels and allocate workspaces here, outside the capture
            work()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps a workspace for each stream, and torch frees them all when torch.compile records a graph of its
        # own. So the capture takes a new one from the graph's pool, where it lasts as long as the graph.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Other threads, such as data loaders or NCCL's watchdog, may keep making calls that a capture forbids.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            # torch would leave the pool marked as being recorded to, and never again free memory that two streams have
            # used.
            with suppress(RuntimeError):  # the recording had not begun
                torch._C._cuda_endAllocateToPool(index, pool)
            _end_capture_of_random_numbers(graph, stream, index)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.set_stream(current)  # if a capture fails to begin or end, torch leaves its stream current

    def start(kept: Callable[[], object] = work) -> None:  # `kept` keeps the graph's tensors alive
        graph.replay()

    return start


# The graphs of captures that broke: torch's allocator of pinned memory goes on asking them what they record.
_BROKEN: list[torch.cuda.CUDAGraph] = []


def _end_capture_of_random_numbers(broken: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, index: int) -> None:
    """After a capture that broke, let random numbers be drawn outside of captures again.

    Up to torch 2.11 the device's generator belongs to the broken capture until another capture ends, and until then
    dropout raises. So this makes an empty capture. It gets a new pool, because torch's allocator of pinned memory still
    records to the pool of the broken capture.
    """
    _BROKEN.append(broken)
    pool = torch.cuda.graph_pool_handle()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=stream, capture_error_mode="thread_local"):
                pass
        except RuntimeError:  # the GPU is lost, or somebody else captures this stream
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, pool)


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """Return the one stream of all captures on a device, because libraries allocate a workspace for each stream."""
    return torch.cuda.Stream(index)
