"""Races: who is timed, how often, and who wins; the clock is a table."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from tests.support.graphs_of_updates import INVALIDATED

CPU = torch.device("cpu")


@pytest.fixture
def race(kernel):
    return kernel.tuning.race


def works(*names: str) -> dict:
    return {name: lambda name=name: name for name in names}


@pytest.mark.parametrize("count", range(1, 9))
def test_each_follows_each_other_equally_often(race, count):
    """And has each place equally often: what heats the device, or fills its caches, favours nobody."""
    names = "abcdefgh"[:count]
    orders = [race.order_of_round(names, turn) for turn in range(count * (1 + count % 2))]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders[:count]} == set(names)
    neighbours = Counter(pair for order in orders for pair in itertools.pairwise(order))
    places = Counter(each for order in orders for each in enumerate(order))
    assert set(neighbours) == set(itertools.permutations(names, 2)) and len(set(neighbours.values())) <= 1
    assert set(places) == set(itertools.product(range(count), names)) and len(set(places.values())) == 1


def test_all_run_in_turns(race, table_clock):
    clock = table_clock({"a": 1.0, "b": 1.2, "c": 1.1})
    times, dropped = race.race(works("a", "b", "c"), clock, seconds=1e9)
    rounds = [clock.bursts[i : i + 3] for i in range(3, len(clock.bursts), 3)]
    assert rounds == [race.order_of_round("abc", turn) for turn in range(race.MOST_ROUNDS)]
    assert {name: time.seconds for name, time in times.items()} == {"a": 1.0, "b": 1.2, "c": 1.1} and not dropped


@pytest.mark.parametrize("count", [1, 4])
def test_bursts_are_long(race, table_clock, count):
    """Work of a millisecond is done twenty times at once, or more, however many matrices it multiplies."""
    clock, asked = table_clock({"a": 1e-3, "b": 0.5}), []
    seconds_of = clock.seconds_of
    clock.seconds_of = lambda work, times: asked.append((work(), times)) or seconds_of(work, times)
    race.race(works("a", "b"), clock, seconds=0, counts={"a": count})
    assert ("a", 20) in asked and {times for name, times in asked if name == "b"} == {1}
    assert all(times == 20 for name, times in asked[4:] if name == "a")


def test_work_that_is_faster_than_a_clock_can_tell_is_timed(race, table_clock):
    times, dropped = race.race(works("a", "b"), table_clock({"a": 0.0, "b": 0.0}), seconds=0)
    assert times == dict.fromkeys("ab", race.Timed(0.0, 0.0)) and not dropped


def test_time_that_is_over_leaves_the_least_rounds(race, table_clock):
    clock = table_clock({"a": 1.0, "b": 1.2}, per_burst=1.0)
    race.race(works("a", "b"), clock, seconds=0.0)
    assert len(clock.bursts) == 2 + 2 * race.LEAST_ROUNDS


def test_who_has_no_rival_is_timed_in_the_least_rounds(race, table_clock):
    """There is nothing to decide, and others wait for the time."""
    clock = table_clock({"a": 1.0})
    race.race(works("a"), clock, seconds=1e9)
    assert len(clock.bursts) == 1 + race.LEAST_ROUNDS


def test_the_clearly_slower_is_timed_once(race, table_clock):
    clock = table_clock({"fast": 1.0, "slow": race.CLEARLY_SLOWER + 0.1, "near": race.CLEARLY_SLOWER - 0.1})
    times, _ = race.race(works("fast", "slow", "near"), clock, seconds=1e9)
    assert clock.bursts.count("slow") == 1 and clock.bursts.count("near") == 1 + race.MOST_ROUNDS
    assert times["slow"].seconds == race.CLEARLY_SLOWER + 0.1


def test_times_are_those_of_one_matrix(race, table_clock):
    """A burst lasts as long as ever, and nobody loses because it multiplies more matrices at once."""
    clock = table_clock({"one": 1.0, "four": 3.0, "three": 7.0})
    times, _ = race.race(works("one", "four", "three"), clock, seconds=1e9, counts={"four": 4, "three": 3})
    assert {name: time.seconds for name, time in times.items()} == {"one": 1.0, "four": 0.75, "three": 7 / 3}
    assert clock.bursts.count("four") == 1 + race.MOST_ROUNDS and clock.bursts.count("three") == 1
    assert race.decide(times, "one") == "four"


@pytest.mark.parametrize("fast, slow, runs_again", [(1.0, 5.0, False), (0.1, 2.0, False), (0.03, 0.5, True)])
@pytest.mark.parametrize("count", [1, 4])
def test_what_takes_long_and_clearly_loses_runs_once(race, table_clock, fast, slow, runs_again, count):
    """Its first run is its time, though caches were cold; unless another one takes less than a second.

    All of this is judged by matrix: neither work may gain or lose by multiplying `count` at once.
    """
    clock = table_clock({"fast": fast, "slow": slow})
    counts = {"slow": count} if count * slow < 4 else {"fast": count, "slow": count}

    def ready(work):
        clock.time += clock.table[work()][0]
        return work

    clock.ready = ready
    times, _ = race.race(works("fast", "slow"), clock, seconds=1e9, counts=counts)
    assert ("slow" in clock.bursts) == runs_again and times["slow"].seconds == slow / count


@pytest.mark.parametrize("count", [1, 4])
def test_one_slow_run_of_what_is_short_decides_nothing(race, table_clock, count):
    """Another process may have had the processor; whoever runs first is no exception."""
    clock = table_clock({"default": [0.08, *[0.03] * 20], "other": 0.03, "slow": 0.5})
    names = "default", "other", "slow"
    times, _ = race.race(works(*names), clock, seconds=1e9, counts=dict.fromkeys(names, count))
    assert times["default"] == times["other"] == race.Timed(0.03 / count, 0.0)
    counts = {name: clock.bursts.count(name) for name in times}
    assert counts == {"default": 2 + race.MOST_ROUNDS, "other": 1 + race.MOST_ROUNDS, "slow": 2}


@pytest.mark.parametrize(
    "fast, slow",
    [(0.03, [0.5, 0.9]), (1e-3, [5e-3, 9e-3, 9e-3]), (1e-3, [9e-3, 5e-3, 9e-3])],
    ids=["once", "before a burst", "in a burst"],
)
def test_of_the_runs_of_what_loses_the_fastest_one_is_its_time(race, table_clock, fast, slow):
    times, _ = race.race(works("fast", "slow"), table_clock({"fast": fast, "slow": slow}), seconds=1e9)
    assert times["slow"].seconds == pytest.approx(min(slow))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("fast, first, runs", [(1.0, 3.0, [1.5]), (1e-5, 0.019, [5e-5, *[1e-5] * 20])], ids=str)
def test_a_first_run_with_cold_caches_decides_nothing(race, table_clock, fast, first, runs, count):
    """It takes up to twice as long as others, or any time below that of a burst. Whoever runs first is no exception."""
    for order in ("fast", "cold"), ("cold", "fast"):
        clock = table_clock({"fast": fast, "cold": runs})

        def ready(work, clock=clock):
            clock.time += first if work() == "cold" else fast
            return work

        clock.ready = ready
        times, _ = race.race(works(*order), clock, seconds=1e9, counts={"fast": count, "cold": count})
        assert times["cold"].seconds == pytest.approx(runs[-1] / count)


def test_work_on_a_gpu_is_judged_by_its_first_replay(race, table_clock):
    """Its first run was compiled and captured, and nobody else has the GPU."""
    clock = table_clock({"fast": 0.03, "compiled": 0.03, "slow": 0.5}, name_of=lambda replay: replay.start())

    def ready(work):
        clock.time += 100.0 if work() == "compiled" else 0.0
        return race.Replay(work, 1)

    clock.ready = ready
    times, _ = race.race(works("fast", "compiled", "slow"), clock, seconds=1e9)
    assert times["compiled"].seconds == 0.03 and clock.bursts.count("slow") == 1


def test_who_raises_is_left_out_and_named(race, table_clock):
    def too_large():
        raise ValueError("out of resources")

    times, dropped = race.race({**works("a"), "b": too_large}, table_clock({"a": 1.0}), seconds=1.0)
    assert list(times) == ["a"] and "out of resources" in dropped["b"]


def test_who_cannot_be_captured_is_left_out(race, table_clock):
    """Its capture has ended, and the GPU is as it was."""

    def refused():
        raise RuntimeError(INVALIDATED)

    times, dropped = race.race({**works("a"), "b": refused}, table_clock({"a": 1.0}), seconds=1.0)
    assert list(times) == ["a"] and "during capture" in dropped["b"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access"),
        torch.cuda.OutOfMemoryError(""),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
    ids=repr,
)
def test_what_says_nothing_of_the_work_is_raised(race, table_clock, error):
    def lost():
        raise error

    lasts = "memory access" in str(error)
    with pytest.raises(race.LostGpuError if lasts else type(error)):
        race.race({"b": lost}, table_clock({}), seconds=1.0)
    assert race.lacks_memory(error) != lasts


def test_who_has_lost_the_gpu_is_known_however_the_error_is_cut_short(race):
    """A first line may be long, and only the end of it says what happened."""
    error = RuntimeError(1000 * "-" + " CUDA error: an illegal memory access")
    assert race.loses_gpu(error) and not race.loses_gpu(RuntimeError(race.error_described(error)))
    assert race.loses_gpu(race.LostGpuError("b", race.error_described(error)))


def test_only_the_line_of_an_error_says_whether_a_capture_was_at_fault(race):
    """What else a message tells of captures does not bring a lost GPU back."""
    lines = "CUDA error: an illegal memory access was encountered", "Graphs that were captured are lost"
    assert all(race.loses_gpu(RuntimeError("\n".join(order))) for order in (lines, lines[::-1]))


@pytest.mark.parametrize("words", ["HIP error", "Triton Error [CUDA]", "Triton Error [HIP]"])
def test_who_has_lost_the_gpu_is_known_on_every_kind_of_gpu(race, words):
    assert race.loses_gpu(RuntimeError(f"{words}: an illegal memory access was encountered"))


def test_median_and_spread_are_of_the_quartiles(race):
    """Of 1, 2, 3, 4, 100 the quartiles are 2, 3 and 4."""
    assert race.timed([100.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, pytest.approx(1 / 3))
    assert race.timed([5.0]) == (5.0, 0.0)
    assert race.timed([0.0, 0.0, 0.0]) == (0.0, 0.0)  # by a clock that is coarser than the work


def test_what_was_chosen_stays_unless_beaten_by_both_spreads(race):
    for before, challenger in itertools.product((0.0, 0.1), (0.0, 0.1)):
        spreads = before + challenger
        for seconds, stays in ((1 + spreads - 0.01, True), (1 + spreads + 0.01, False)):
            times = {"new": race.Timed(1.0, challenger), "old": race.Timed(seconds, before)}
            expected = "old" if (stays and seconds >= 1) or seconds < 1 else "new"
            assert race.decide(times, "old") == expected
    even = race.Timed(1.0, 0.0)
    assert race.decide({"new": even, "old": even}, "old") == "old"
    assert race.decide({"new": even}, "old") == "new"
