"""CUDA graphs: work that is recorded once and then started as one launch."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch


def captured(work: Callable[[], object], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """Return what starts `work`, done once before, as a CUDA graph with memory of `pool`, None for a pool of its own.

    Addresses are those of the capture: what `work` reads and writes must stay where it is.
    """
    stream = _capture_stream(device.index)
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # libraries load kernels and take their workspaces outside of the capture
            work()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, as those that load data or watch over NCCL, may go on calling what a capture forbids.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()

    def start(kept: Callable[[], object] = work) -> None:  # which holds what the graph reads and writes
        graph.replay()

    return start


@functools.cache
def _capture_stream(index: int | None) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(index)
