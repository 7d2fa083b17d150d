"""Timing round by round: every contestant once a round, so that a ratio compares what ran side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from benchmarks.timing import seconds_of

WARM_UP = 2
# Fewer have no quartiles to speak of.
LEAST_ROUNDS = 3


class Deadline:
    """The end of the time that a run was given; None is no end."""

    def __init__(self, minutes: float | None = None):
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile."""

    low: float
    middle: float
    high: float


def run_rounds(
    works: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, deadline: Deadline
) -> dict[str, list[float]]:
    """Return each work's seconds, round by round; another one begins every round, and the first rounds warm up.

    There are `rounds` of them, or as few as LEAST_ROUNDS where the time is up.
    """
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + rounds):
        if turn >= WARM_UP + LEAST_ROUNDS and deadline.passed():
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(seconds_of(works[name], device))
    return {name: times[WARM_UP:] for name, times in seconds.items()}


def quartiles(values: list[float]) -> Quartiles:
    """Return the quartiles of `values`, all alike for a single one."""
    return Quartiles(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3))


def ratios(theirs: list[float], ours: list[float]) -> Quartiles:
    """Return the quartiles over rounds of their time over ours."""
    return quartiles([a / b for a, b in zip(theirs, ours)])
