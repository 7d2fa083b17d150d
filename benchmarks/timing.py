"""Timing of programs that take turns, so that all see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Operands that are rotated through take at least this much, several times the L2 cache of every GPU that we know.
ROTATED_BYTES = 1 << 28

# Copies of small operands: as many as make a launch's own time show beside what starts a graph.
MOST_COPIES = 64


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def take_turns(works: list[Callable[[], object]], device: torch.device, rounds: int) -> list[tuple[float, float]]:
    """Return median seconds and relative spread of each work; the first two rounds warm up."""
    times = [[seconds_of(work, device) for work in works] for _ in range(rounds + 2)][2:]
    quartiles = [statistics.quantiles(column, n=4) for column in zip(*times)]
    return [(middle, (high - low) / 2 / middle) for low, middle, high in quartiles]


def rotated(X: Tensor) -> list[Tensor]:
    """Return copies of X that together do not fit into the cache of a GPU; on a CPU two of them."""
    count = ROTATED_BYTES // (X.numel() * X.element_size()) + 2 if X.is_cuda else 2
    return [X.clone() for _ in range(min(MOST_COPIES, count))]


def replayed(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """Return one call that makes all of `calls`: on a GPU as a graph, in which launching takes no time of the CPU's.

    Each is made once before, to compile what it needs.
    """

    def one_by_one() -> None:
        for call in calls:
            call()

    if device.type == "cpu":
        return one_by_one
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # libraries take their workspaces outside of the capture
        one_by_one()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_by_one()

    def replay(kept: Sequence[Callable[[], object]] = calls) -> None:  # their operands are what the graph reads
        graph.replay()

    return replay
