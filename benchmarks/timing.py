"""Timing of programs that take turns, so that all see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


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
