"""Timing round by round: every contestant once per round, so that a ratio compares runs under the same conditions."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.lost_gpu import blaming
from tests.support.proofs import graphs, race

WARM_UP = 2
# Fewer rounds give no useful quartiles.
LEAST_ROUNDS = 3

# Operands that calls rotate through take at least this much: several times the L2 cache of every GPU that we know.
ROTATED_BYTES = 1 << 28

# No operand has more copies. So many show the time of a launch beside the time of starting a graph, but those of small
# operands fit into the cache.
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


class Deadline:
    """The end of a run's time; None means no end."""

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
    works: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    deadline: Deadline,
    contestants: Mapping[str, str] | None = None,
) -> dict[str, list[float]]:
    """Return each work's seconds, round by round. Each round has another order, and the first rounds warm up.

    There are `rounds` rounds, or, if the time is up, as few as LEAST_ROUNDS. If `contestants` has a name for each work,
    those take turns, and the works of one follow each other in the order of `works`. Raises LostGpuError with the name
    of the work, or of its contestant.
    """
    turns: dict[str, list[str]] = {}
    for name in works:
        turns.setdefault(contestants[name] if contestants else name, []).append(name)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(WARM_UP + rounds):
        if turn >= WARM_UP + LEAST_ROUNDS and deadline.passed():
            break
        for contestant in race.order_of_round(list(turns), turn):
            with blaming(contestant):
                taken = [(name, seconds_of(works[name], device)) for name in turns[contestant]]
            for name, each in taken:
                seconds[name].append(each)
    return {name: times[WARM_UP:] for name, times in seconds.items()}


def processor_seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def quartiles(values: list[float]) -> Quartiles:
    """Return the quartiles of `values`; for a single value all three are equal."""
    return Quartiles(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3))


def ratios(theirs: list[float], ours: list[float]) -> Quartiles:
    """Return the quartiles over rounds of their time divided by ours."""
    return quartiles([a / b for a, b in zip(theirs, ours)])


def take_turns(
    works: Sequence[Callable[[], object]], device: torch.device, rounds: int, names: Sequence[str] = ()
) -> list[tuple[float, float]]:
    """Return each work's median seconds and their spread, computed as in the package's own race.

    On a GPU each work runs for BURST_SECONDS in a round; the seconds are those of one call. Raises LostGpuError with
    the work's name, if works have `names`.
    """
    names = names or [f"work {i} of {len(works)}" for i in range(1, len(works) + 1)]
    counts = []
    for name, work in zip(names, works):
        with blaming(name):
            counts.append(_repeats(work, device))
    bursts = {name: partial(_repeated, *each) for name, each in zip(names, zip(works, counts))}
    times = map(race.timed, run_rounds(bursts, device, rounds, Deadline()).values())
    return [(time.seconds / count, time.spread) for time, count in zip(times, counts)]


def _repeats(work: Callable[[], object], device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    work()  # compiles, so it is not timed
    return math.ceil(race.BURST_SECONDS / seconds_of(work, device))


def _repeated(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def rotated(X: Tensor) -> list[Tensor]:
    """Return copies of X that together do not fit into a GPU's cache, but at most MOST_COPIES; on a CPU two of them."""
    count = ROTATED_BYTES // (X.numel() * X.element_size()) + 2 if X.is_cuda else 2
    return [X.clone() for _ in range(min(MOST_COPIES, count))]


def replayed(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """Return one call that makes all of `calls`: on a GPU as a graph, so that launching takes no time of the CPU.

    Each call is made once before, to compile what it needs.
    """

    def one_by_one() -> None:
        for call in calls:
            call()

    return one_by_one if device.type == "cpu" else graphs.captured(one_by_one, device)
