"""Timing of several ways to do one thing: in turns, and in bursts that are long compared with their start."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Callable, ContextManager, Iterator, Mapping, NamedTuple, Optional, Sequence

import torch

from ..kernels.graphs import captured

# Long enough that a GPU reaches its power limit, as it does in a step, and that starting a burst does not matter.
BURST_SECONDS = 0.02
# Fewer rounds give no useful quartiles; more than MOST_ROUNDS add nothing.
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
# Starting a graph takes some microseconds. Work that takes less than SHORT_SECONDS is timed in graphs of several calls,
# as a step's graph has many products.
SHORT_SECONDS, CALLS_IN_A_GRAPH = 1e-4, 16
# Work whose first burst takes this many times as long as the fastest is not timed again.
CLEARLY_SLOWER = 2.0
# Work on a CPU that takes less gets another run before it counts as clearly slower: it may have had to wait for others.
LONG_SECONDS = 1.0
# The first run of a work may take this many times as long as others, because caches are cold.
COLD = 2.0

Work = Callable[[], object]


class Timed(NamedTuple):
    """The median seconds of one call, and the spread: half the distance of the quartiles divided by the median."""

    seconds: float
    spread: float


class Replay(NamedTuple):
    """A graph of some calls of the same work."""

    start: Work
    calls: int

    def __call__(self) -> None:
        self.start()


class Clock:
    """Measures how long work takes on a device, and tells the time."""

    def __init__(self, device: torch.device):
        self.device = device

    def now(self) -> float:
        return time.monotonic()

    def ready(self, work: Work) -> Work:
        """Run `work` once and return it in the form in which a step runs it: on a GPU as the replay of a graph."""
        if self.device.type != "cuda":
            work()
            return work
        replay = Replay(captured(work, self.device), 1)
        # The first replay also brings the graph to the GPU.
        if min(self.seconds_of(replay, 1) for _ in range(4)) >= SHORT_SECONDS:
            return replay
        return Replay(captured(partial(_repeat, work, CALLS_IN_A_GRAPH), self.device), CALLS_IN_A_GRAPH)

    def seconds_of(self, work: Work, times: int) -> float:
        """Return the seconds that it takes to do `work` `times` times."""
        if isinstance(work, Replay):
            launches = math.ceil(times / work.calls)
            return self._seconds_on_gpu(work.start, launches) * times / (launches * work.calls)
        start = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - start

    def _seconds_on_gpu(self, work: Work, times: int) -> float:
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3


class LostGpuError(RuntimeError):
    """Work of this `name` has made the GPU unusable for the process."""

    def __init__(self, name: str, why: str):
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def race(
    works: Mapping[str, Work],
    clock: Clock,
    seconds: float,
    around: Callable[[str], ContextManager] = nullcontext,
    counts: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Return the times of each of `works`, and the errors of those that raised.

    `counts` says how many matrices a work multiplies; all that it does not name have one. Times are those of one.

    The race takes about `seconds`, but each work gets LEAST_ROUNDS. Work that is clearly slower after its first burst
    is not raced; on a CPU it gets one more run before, unless that would take LONG_SECONDS. Each work runs for the
    first time inside `around(name)`. Raises LostGpuError. Out-of-memory errors are raised, too, because they say
    nothing about the work.
    """
    end = clock.now() + seconds
    sizes = {name: counts.get(name, 1) for name in works}
    first, dropped = _first_bursts(works, clock, around, sizes)
    fastest = min((time for _, time in first.values()), default=math.inf)
    for name in _slower_than(fastest, first):
        first[name] = _given_another_run(*first[name], clock, sizes[name])
    slow = _slower_than(fastest, first)
    runners = {name: ready for name, (ready, _) in first.items() if name not in slow}
    times = {name: _calls_of_a_burst(first[name][1] * sizes[name]) for name in runners}
    per_call: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for turn in range(MOST_ROUNDS if len(names) > 1 else LEAST_ROUNDS):
        if turn >= LEAST_ROUNDS and clock.now() >= end:
            break
        for name in order_of_round(names, turn):
            per_call[name].append(clock.seconds_of(runners[name], times[name]) / (times[name] * sizes[name]))
    slow_ones = {name: Timed(first[name][1], 0.0) for name in slow}
    return {**{name: timed(seconds) for name, seconds in per_call.items()}, **slow_ones}, dropped


def order_of_round(names: Sequence[str], turn: int) -> list[str]:
    """Return all of `names` in the order in which they are timed in round number `turn`; another begins each round.

    Work runs longer after work that has heated the device, or filled its caches. So over len(names) rounds, or twice as
    many if that is odd, each name comes right after each other one equally often, and takes each place equally often
    (E. J. Williams, 1949, "Experimental designs balanced for the estimation of residual effects of treatments").
    """
    count = len(names)
    zigzag = [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]
    order = [names[(place + turn) % count] for place in zigzag]
    is_mirrored = count % 2 == 1 and turn // count % 2 == 1
    return order[::-1] if is_mirrored else order


def timed(seconds: list[float]) -> Timed:
    """Return the median of some times, and their spread."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Timed(middle, (high - low) / 2 / middle if middle else 0.0)


def decide(times: Mapping[str, Timed], before: str) -> str:
    """Return the fastest. The choice made `before` stays unless it is slower by more than both spreads together."""
    fastest = min(times, key=lambda name: times[name].seconds)
    kept: Optional[Timed] = times.get(before)
    if kept is not None and kept.seconds <= times[fastest].seconds * (1 + kept.spread + times[fastest].spread):
        return before
    return fastest


def error_described(error: BaseException) -> str:
    """Return an error's class and the beginning of its text."""
    return f"{type(error).__name__}: {str(error)[:200]}"


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host is out of memory."""
    # The driver and cuBLAS have errors of their own for it.
    words = "can't allocate memory", "not enough memory", "bad_alloc", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or any(w in str(error) for w in words)


def loses_gpu(error: BaseException) -> bool:
    """Whether the process can no longer use the GPU after this error: LostGpuError, or what torch or Triton raises.

    An error about something that a capture forbids ends only the capture. Exactly these errors contain "captur".
    """
    return isinstance(error, LostGpuError) or any(
        words in line and "captur" not in line
        for line in str(error).splitlines()
        for words in ("CUDA error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]")
    )


@contextmanager
def dropping(name: str, dropped: dict[str, str]) -> Iterator[None]:
    """Record in `dropped` why the work of this name failed, whatever it raises: Triton raises errors of any class.

    Raises LostGpuError if the GPU became unusable. Out-of-memory errors pass, because they say nothing about the work.
    """
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            raise
        if loses_gpu(error):
            raise LostGpuError(name, error_described(error)) from error
        dropped[name] = error_described(error)


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def _calls_of_a_burst(seconds: float) -> int:
    return max(1, math.ceil(BURST_SECONDS / max(seconds, 1e-9)))


def _first_bursts(
    works: Mapping[str, Work], clock: Clock, around: Callable[[str], ContextManager], sizes: Mapping[str, int]
) -> tuple[dict[str, tuple[Work, float]], dict[str, str]]:
    """Return each work in its timed form with the seconds of one matrix, and the errors of those that raised."""
    first, dropped = {}, {}
    for name, work in works.items():
        fastest = min((seconds for _, seconds in first.values()), default=math.inf)
        with dropping(name, dropped), around(name):
            ready, once = _first_burst(work, clock, fastest * sizes[name])
            first[name] = ready, once / sizes[name]
    return first, dropped


def _first_burst(work: Work, clock: Clock, fastest: float) -> tuple[Work, float]:
    """Return work in its timed form with the seconds of one call. What clearly loses on a CPU runs once: it is slow."""
    start = clock.now()
    ready = clock.ready(work)
    once = clock.now() - start
    if not isinstance(ready, Replay) and once > max(BURST_SECONDS, COLD * CLEARLY_SLOWER * fastest):
        return ready, once
    once = clock.seconds_of(ready, 1)
    if once < BURST_SECONDS:
        times = _calls_of_a_burst(once)
        once = min(once, clock.seconds_of(ready, times) / times)
    return ready, once


def _slower_than(fastest: float, first: Mapping[str, tuple[Work, float]]) -> list[str]:
    return [name for name, (_, seconds) in first.items() if seconds > CLEARLY_SLOWER * fastest]


def _given_another_run(ready: Work, once: float, clock: Clock, size: int) -> tuple[Work, float]:
    """Return `ready` with the seconds of one of `size` matrices: the fewer of `once` and of another run.

    There is no other run if it would be long.
    """
    again = not isinstance(ready, Replay) and once * size < LONG_SECONDS
    return ready, min(once, clock.seconds_of(ready, 1) / size) if again else once
