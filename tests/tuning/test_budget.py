"""The time budget of tuning: what is measured in it, in which order, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch.nn import Parameter

from tests.tuning.conftest import BF16, CPU, EVEN, TABLES, chosen, run, tasks


def measured(kernel, todo) -> list[bool]:
    return [chosen(kernel, task.need.m, task.need.k).source == "measured here" for task in todo]


def taking(clock, seconds: float, then: Exception | None = None) -> Callable[[], None]:
    """A proof that takes a while on a clock, and may find something."""

    def prove():
        clock.time += seconds
        if then is not None:
            raise then

    return prove


def test_a_budget_ends_between_measurements(kernel, tune, contests, table_clock):
    """Each takes 9 seconds for three first bursts and three rounds: the third begins in time, and is the last one."""
    clock = table_clock(EVEN, per_burst=0.75)
    todo = tasks(kernel, *((40, 64 + i) for i in range(5)))
    told = run(tune.Tuner(20.0, clock), tune, todo)
    assert measured(kernel, todo) == [True] * 3 + [False] * 2
    assert ["the time budget has no room for it" in text for text in told] == [False] * 3 + [True] * 2 + [False]
    assert all(f"40 x {64 + i} bfloat16" in told[-1] for i in range(3, 5)) and "2 left to their default" in told[-1]
    assert clock.time == 3 * 9


def test_proofs_may_take_half_of_the_time_if_others_wait(kernel, tune, contests, table_clock):
    """Three proofs take 18 seconds, which leaves a third of 60 only the fewest rounds of a race, 9 seconds.

    The last proof of the last size would begin after the end: its race has two candidates, and takes 6 seconds.
    """
    clock = table_clock(EVEN, per_burst=0.75)
    contests.update(dict.fromkeys(TABLES, taking(clock, 6.0)))
    todo = tasks(kernel, (40, 66), (40, 65), (40, 64))
    told = run(tune.Tuner(60.0, clock), tune, todo)
    assert measured(kernel, todo) == [True] * 3 and clock.time == 2 * (18 + 9) + 12 + 6
    assert ["is left out: the time budget" in text for text in told] == [False, False, True, False]


def test_proofs_leave_others_that_wait_half_of_the_time(kernel, tune, contests, table_clock):
    """The third proof of the first size would begin after half of 20 seconds."""
    clock = table_clock(EVEN)
    contests.update(dict.fromkeys(TABLES, taking(clock, 5.0)))
    todo = tasks(kernel, (40, 65), (40, 64))
    run(tune.Tuner(20.0, clock), tune, todo)
    assert measured(kernel, todo) == [True] * 2 and clock.time == 10 + 10


@pytest.mark.parametrize("waiting, seconds", [(0, 9.0), (2, 4.5)])
def test_proofs_may_use_all_the_time_that_is_not_left_to_others(kernel, tune, contests, table_clock, waiting, seconds):
    """The third begins after 18 of 20 seconds where no other size waits, and after 9 where two do."""
    clock = table_clock(EVEN)
    contests.update(dict.fromkeys(TABLES, taking(clock, seconds)))
    first, *_ = tune.stages_of(tune.Tuner(20.0, clock), tasks(kernel, *((40, 64 + i) for i in range(waiting + 1))))
    assert "is left out" not in first() and clock.time == 3 * seconds


def test_each_call_measures_a_size_however_slow_its_proofs(kernel, tune, contests, table_clock):
    clock = table_clock(EVEN)
    contests.update(dict.fromkeys(TABLES, taking(clock, 50.0)))
    todo = tasks(kernel, (40, 65), (40, 64))
    for expected in [True, False], [True, True]:
        run(tune.Tuner(1.0, clock), tune, tune.unmeasured(tune.largest_first(todo)))
        assert measured(kernel, todo) == expected


def test_what_a_late_proof_has_found_is_kept(kernel, measurements, tune, contests, table_clock):
    """No other begins after it, and torch's products are timed alone."""
    clock, proven = table_clock(EVEN), []
    wrong = kernel.tuning.proof.WrongResultError("not symmetric")
    contests["NATIVE"] = taking(clock, 30.0, then=wrong)
    contests["NATIVE_SYMMETRIC"] = lambda: proven.append("NATIVE_SYMMETRIC")
    told = run(tune.Tuner(20.0, clock), tune, tasks(kernel, (24, 40)))
    assert not proven and set(clock.bursts) == {"SINGLE"}
    assert "NATIVE failed its proof: not symmetric" in told[0]
    assert "NATIVE_SYMMETRIC is left out: the time budget has no room for it" in told[0]
    measurements.forget()
    failed = measurements.failed(kernel.kernels.speeds.machine.key_of(CPU), "cpu_products", "bfloat16")
    assert failed == {"NATIVE": "not symmetric"}


def test_what_had_no_time_is_tried_by_the_next_call(kernel, measurements, tune, contests, table_clock):
    """Against what was chosen before, which was proven then and is used until then, also where no time is left."""
    clock, todo = table_clock({**EVEN, "NATIVE_SYMMETRIC": 0.1}), tasks(kernel, (24, 40))
    contests["NATIVE"] = contests["NATIVE_SYMMETRIC"] = taking(clock, 30.0)
    told = run(tune.Tuner(20.0, clock), tune, todo)
    assert "NATIVE_SYMMETRIC is left out: the time budget" in told[0] and measured(kernel, todo) == [True]
    measurements.forget()  # in the next process
    assert tune.unmeasured(todo) == todo and measured(kernel, todo) == [True]
    told = run(tune.Tuner(0.0, clock), tune, todo)
    assert "measured before" in told[0] and "left to their default" not in told[-1]
    run(tune.Tuner(20.0, clock), tune, todo)
    assert chosen(kernel, 24, 40).name == kernel.kernels.products.cpu_tables(BF16)["NATIVE_SYMMETRIC"].name
    measurements.forget()
    assert not tune.unmeasured(todo)


def test_a_call_that_times_nothing_leaves_what_was_not_tried(kernel, measurements, tune, contests, table_clock):
    clock, todo = table_clock(EVEN), tasks(kernel, (24, 40))
    contests["NATIVE"] = taking(clock, 30.0)
    run(tune.Tuner(20.0, clock), tune, todo)
    contests.update({name: ValueError("no such instructions") for name in TABLES})
    clock.ready = lambda work: contests["NATIVE"].no_such_work  # raises
    told = run(tune.Tuner(60.0, clock), tune, todo)
    assert tune.unmeasured(todo) == todo and measured(kernel, todo) == [True]
    assert "left to their default" not in told[-1]


def test_what_fails_when_it_is_timed_is_left_out_by_name(kernel, tune, contests, table_clock):
    """Once and for all, where another of ours could be timed."""
    clock, todo = table_clock(EVEN), tasks(kernel, (24, 40))

    def ready(work):
        if work() == "NATIVE":
            raise ValueError("no such instructions")
        return work

    clock.ready = ready
    told = run(tune.Tuner(20.0, clock), tune, todo)
    assert "NATIVE is left out: ValueError: no such instructions" in told[0]
    assert measured(kernel, todo) == [True] and not tune.unmeasured(todo)


def test_each_of_ours_is_on_trial_when_it_is_proven_and_when_it_is_first_timed(
    kernel, tune, contests, table_clock, monkeypatch
):
    """Either may hang, and torch's products, which nothing could replace, have no trial."""
    tried = []

    @contextmanager
    def trial(key, need, name):
        tried.append(name)
        yield

    monkeypatch.setattr(kernel.tuning.findings, "trial", trial)
    run(tune.Tuner(20.0, table_clock(EVEN)), tune, tasks(kernel, (24, 40)))
    assert tried == ["NATIVE", "NATIVE_SYMMETRIC"] * 2


def test_a_race_that_has_begun_gets_its_fewest_rounds(kernel, tune, contests, table_clock):
    """The proofs leave one second, the first bursts take more."""
    clock = table_clock(EVEN, per_burst=1.0)
    contests["NATIVE"] = taking(clock, 19.0)
    todo = tasks(kernel, (24, 40))
    run(tune.Tuner(20.0, clock), tune, todo)
    assert measured(kernel, todo) == [True] and len(clock.bursts) == 3 * (1 + 3)
    # All are as fast, so that what was chosen without a measurement stays.
    assert chosen(kernel, 24, 40).name == kernel.kernels.products.cpu_tables(BF16)["NATIVE"].name


def test_sizes_with_most_work_come_first(kernel, tune, measurements, contests, monkeypatch, table_clock):
    """By the number of matrices, too, in `tune` as in `warmup`."""
    monkeypatch.setattr(tune, "Clock", table_clock(EVEN))
    told = []
    tell = lambda done, total, what: told.append(what.split(" bfloat16")[0])  # noqa: E731
    kernel.tune([(8, 16), (16, 16), (40, 24), (64, 16, 8), (2, 24, 24)], dtype=BF16, device="cpu", progress=tell)
    assert told[:4] == ["8 x 16", "24 x 24", "24 x 40", "16 x 16"]
    told.clear()
    sizes = [(16, 32), (40, 56), (40, 40), (40, 40)]
    kernel.Muon([(str(i), Parameter(torch.ones(size))) for i, size in enumerate(sizes)], ns_dtype=BF16).warmup(tell)
    assert told[:3] == ["40 x 40", "40 x 56", "16 x 32"]


def test_a_size_is_measured_with_the_most_matrices_that_need_it(kernel, tune):
    """Wherever they are in the list."""
    (task,) = tasks(kernel, (24, 40))
    assert tune.unmeasured([task._replace(count=count) for count in (3, 5, 2)]) == [task._replace(count=5)]


def test_a_budget_begins_once(kernel, tune, contests, table_clock):
    """When measuring does, even if the first measurement of this process comes later."""
    clock = table_clock(EVEN)
    tuner, todo = tune.Tuner(20.0, clock), tasks(kernel, (24, 40))
    tuner.begin(CPU)
    clock.time += 20
    run(tuner, tune, todo)
    assert measured(kernel, todo) == [False] and not clock.bursts


def test_a_budget_of_nothing_measures_nothing(kernel, tune, contests, table_clock):
    clock = table_clock(EVEN)
    assert "1 left to their default" in run(tune.Tuner(0, clock), tune, tasks(kernel, (8, 8)))[-1] and not clock.bursts


def test_the_default_and_torchs_products_are_proven_however_late_it_is(kernel, tune, contests, table_clock):
    """Wherever they are among the candidates; of these, only those that have failed before are named."""
    (task,), file = tasks(kernel, (24, 40)), kernel.kernels.speeds.measurement_file
    contest = tune.contest_of(task)
    order = "NATIVE", "NATIVE_SYMMETRIC", "SINGLE"
    contest = contest._replace(candidates={name: contest.candidates[name] for name in order}, before=order[1])
    table = file.Table({}, {("cpu_products", "bfloat16"): {"NATIVE_GRAM": "wrong"}})
    kernel.kernels.speeds.measurements.keep(kernel.kernels.speeds.machine.key_of(CPU), table)
    finding = kernel.tuning.findings.compete(task, contest, table_clock(EVEN), lambda: 1.0, proofs_end=0.0)
    assert finding.times.keys() == {"NATIVE_SYMMETRIC", "SINGLE"} and finding.entry["untried"] == ["NATIVE"]
    assert not finding.failed_before


def test_work_is_counted_in_multiplications_and_has_one_order_on_all_ranks(kernel, tune):
    """Of a product of a matrix with its transpose, the short side counts twice. The last two have as many."""
    todo = tasks(kernel, (40, 56), (16, 200), (8, 16), (4, 64))
    for order in todo, todo[::-1]:
        sizes = [task.need.size for task in tune.largest_first(order)]
        assert sizes[:2] == [(40, 56), (16, 200)] and sizes[2:] == [(4, 64), (8, 16)]


def test_what_no_measurement_is_kept_of_is_not_measured(kernel, tune):
    (task,) = tasks(kernel, (24, 40))
    assert tune.unmeasured([task._replace(device=torch.device("mps"))]) == []
