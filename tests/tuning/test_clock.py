"""The clock of races: how long work takes on a CPU and on a GPU, without one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch


@pytest.fixture
def race(kernel):
    return kernel.tuning.race


def test_the_clock_of_a_cpu_measures(race):
    """Work that has run once: what a first run compiles, and the caches that it fills, are no part of a step."""
    clock, runs = race.Clock(torch.device("cpu")), []
    work = clock.ready(lambda: runs.append(torch.zeros(1)))
    assert len(runs) == 1
    assert 0 < clock.seconds_of(work, 3) < 1 and len(runs) == 4 and clock.now() <= clock.now()


def test_time_on_a_gpu_is_what_passes_between_two_events_on_it(race, monkeypatch):
    """In seconds, and not before the second event has come. Here each start takes one."""
    current, starts = [], []

    @contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    class Event:
        def __init__(self, enable_timing: bool):
            self.measures, self.has_come = enable_timing, False

        def record(self):
            self.on, self.at = current[-1], len(starts)

        def synchronize(self):
            self.has_come = True

        def elapsed_time(self, end) -> float:
            assert self.measures and end.measures and end.has_come and self.on == end.on
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = race.Clock(torch.device("cuda", 1))
    replay = race.Replay(lambda: starts.append(current[-1]), 1)
    assert clock.seconds_of(replay, 3) == 3.0 and starts == [clock.device] * 3


def test_short_work_is_timed_many_times_in_a_graph(race, monkeypatch):
    """Starting a graph takes 5 microseconds here, so that work of 1 alone would look six times as long.

    The first start also brings the graph to the GPU.
    """
    seconds, waits = 0.0, []

    def spend(more: float) -> None:
        nonlocal seconds
        seconds += more

    def captured(work, device):
        return lambda: (spend(5e-6), work(), waits and spend(waits.pop()))

    def seconds_on_gpu(self, work, times: int) -> float:
        before = seconds
        for _ in range(times):
            work()
        return seconds - before

    monkeypatch.setattr(race, "captured", captured)
    monkeypatch.setattr(race.Clock, "_seconds_on_gpu", seconds_on_gpu)
    clock = race.Clock(torch.device("cuda", 0))
    for real, calls in ((1e-6, race.CALLS_IN_A_GRAPH), (1e-3, 1)):
        waits.append(1.0)
        ready = clock.ready(lambda real=real: spend(real))
        for times in (1, 100, 1600):
            assert clock.seconds_of(ready, times) / times == pytest.approx(real + 5e-6 / calls)
