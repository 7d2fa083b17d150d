"""What is measured, in how much time, what is said of it, and what it changes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from tests.tuning.conftest import BF16, EVEN, TABLES, chosen, run, tasks


@pytest.mark.parametrize("fastest", TABLES)
def test_the_fastest_is_taken_and_kept(kernel, measurements, tune, contests, table_clock, fastest):
    tuner = tune.Tuner(60.0, table_clock({**EVEN, fastest: 0.5}))
    told = run(tuner, tune, tasks(kernel, (24, 40)))
    assert chosen(kernel, 24, 40).name == kernel.kernels.products.cpu_tables(BF16)[fastest].name
    assert (
        told[-1]
        == f"measured 1 products: {int(fastest != 'SINGLE')} ours, {int(fastest == 'SINGLE')} torch's, none failed"
    )
    measurements.forget()
    assert chosen(kernel, 24, 40).source == "measured here"
    assert not tune.unmeasured(tasks(kernel, (24, 40)))


def test_a_wrong_candidate_is_never_taken_and_named(kernel, measurements, tune, contests, table_clock):
    contests["NATIVE"] = kernel.tuning.proof.WrongResultError("not symmetric")
    clock = table_clock({**EVEN, "NATIVE": 0.1})
    told = run(tune.Tuner(60.0, clock), tune, tasks(kernel, (24, 40), (8, 8)))
    assert "NATIVE" not in clock.bursts and "NATIVE" not in (chosen(kernel, *size).name for size in ((24, 40), (8, 8)))
    assert (
        "NATIVE failed its proof: not symmetric" in told[0] and "failed their proof: NATIVE (not symmetric)" in told[-1]
    )
    (file,) = Path(os.environ["XDG_CACHE_HOME"], "optimizer").iterdir()
    assert json.loads(file.read_text())["failed"]["cpu_products"]["bfloat16"] == {"NATIVE": "not symmetric"}
    measurements.forget()
    contests.clear()  # in the next process a proof might find nothing
    told = run(tune.Tuner(60.0, clock), tune, tasks(kernel, (16, 16)))
    assert "NATIVE" not in clock.bursts
    assert told[-1].endswith("left out as they failed before: NATIVE (not symmetric)")


def test_what_failed_is_not_taken_by_default_either(kernel, measurements, tune, contests, table_clock):
    """For a size of which nothing was measured."""
    for table in ("NATIVE", "NATIVE_SYMMETRIC"):
        contests[table] = kernel.tuning.proof.WrongResultError("wrong")
    run(tune.Tuner(60.0, table_clock(EVEN)), tune, tasks(kernel, (24, 40)))
    assert chosen(kernel, 32, 100).name == "torch.mm"


def test_a_candidate_that_raises_is_left_out(kernel, tune, contests, table_clock):
    contests["NATIVE_SYMMETRIC"] = ValueError("no such instructions")
    told = run(tune.Tuner(60.0, table_clock(EVEN)), tune, tasks(kernel, (24, 40)))
    assert "no such instructions" in told[0] and chosen(kernel, 24, 40).source == "measured here"


def test_a_table_whose_method_is_not_safe_is_no_candidate(kernel, monkeypatch):
    """As float32 squares are not where torch rounds the factors of float32 products."""
    contest = kernel.tuning.contest
    choose = contest.choose_iteration

    def chosen_iteration(device, dtype, size, schedule, method, circumstances):
        if method == "gram_float32":
            raise ValueError("not safe")
        return choose(device, dtype, size, schedule, method, circumstances)

    tables = kernel.kernels.products.cpu_tables(BF16)
    gram = {name for name, table in tables.items() if table.float32_squares}
    (task,) = contest.tasks_of(torch.device("cpu"), BF16, (128, 512), 1)
    for default in "NATIVE", *gram:  # a file, or the processor, may prefer it
        taken = lambda *_, method="auto", d=default: tables["NATIVE" if method == "standard" else d]  # noqa: E731
        monkeypatch.setattr(contest, "select_products", taken)
        monkeypatch.setattr(contest, "choose_iteration", choose)
        candidates = set(contest.cpu_contest(task).candidates)
        monkeypatch.setattr(contest, "choose_iteration", chosen_iteration)
        left = contest.cpu_contest(task)
        assert candidates - set(left.candidates) == gram
        assert left.before == "NATIVE"


def test_tune_measures_for_real(kernel, measurements, capsys):
    """Small sizes on this CPU, by the real clock; twice the same size, tall and wide, is one measurement."""
    kernel.tune([(24, 40), (2, 40, 24)], dtype=BF16, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["tune 1/2", "tune 2/2"]
    assert re.match(r"tune 2/2: measured 1 products: [01] ours, [01] torch's, none failed", lines[-1])
    assert chosen(kernel, 24, 40).source == "measured here"
    ours = lines[-1].split("products: ")[1].removesuffix(", none failed")
    kernel.tune([(24, 40), (2, 40, 24)], dtype=BF16, device="cpu")
    assert capsys.readouterr().out == f"tune 1/1: already measured 1 products: {ours}\n"


def test_torchs_products_remain_if_a_file_says_that_all_failed(kernel, measurements):
    key = kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    table = kernel.kernels.speeds.measurement_file.empty()
    table.failed["cpu_products", "bfloat16"] = dict.fromkeys(
        kernel.kernels.products.cpu_tables(BF16), "written by hand"
    )
    measurements.keep(key, table)
    assert (chosen(kernel, 24, 40).name, chosen(kernel, 24, 40).source) == ("torch.mm", "as all have failed here")


def test_random_numbers_of_the_user_stay_as_they_were(kernel, measurements):
    """Of a rank that measures, they would not be those of the others."""
    state = torch.random.get_rng_state()
    kernel.tune([(24, 40)], dtype=BF16, device="cpu", progress=lambda *_: None)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_neither_autocast_nor_gradients_around_a_call_are_what_is_measured(kernel, tune, contests, table_clock):
    """They do not change a step either."""
    seen = []
    contests.update(
        dict.fromkeys(TABLES, lambda: seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())))
    )
    with torch.autocast("cpu", dtype=BF16):
        run(tune.Tuner(60.0, table_clock(EVEN)), tune, tasks(kernel, (24, 40)))
    assert seen == [(False, False)] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_nothing_is_measured_where_there_is_no_choice(kernel, measurements, dtype):
    """And that is said."""
    told = []
    kernel.tune([(24, 40)], dtype=dtype, device="cpu", progress=lambda *stage: told.append(stage))
    name = str(dtype).removeprefix("torch.")
    assert told == [(1, 1, f"torch's products are the only ones for {name} matrices of these shapes on cpu")]
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


def test_a_gpu_on_which_triton_cannot_launch_is_said_to_be_one(kernel, tune, monkeypatch):
    monkeypatch.setattr(tune, "triton_fault", lambda device: "no compiler")
    told = tune._known([], torch.device("cuda", 0), torch.float16)
    assert told.endswith("float16 matrices of these shapes on cuda:0, as Triton cannot launch here (no compiler)")


def test_warmup_measures_and_plans_anew(kernel, tune, measurements, contests, monkeypatch, table_clock):
    monkeypatch.setattr(tune, "Clock", table_clock({**EVEN, "SINGLE": 0.5}))
    p, told = Parameter(torch.ones(24, 40)), []
    optimizer = kernel.Muon([("w", p)], ns_dtype=BF16)
    assert "by default" in optimizer.explain().rows[0].kernel
    optimizer.warmup(lambda *stage: told.append(stage))
    assert [stage[:2] for stage in told] == [(1, 3), (2, 3), (3, 3)]
    assert "standard torch.mm" in told[-1][2]  # compiled is what was chosen
    assert optimizer.explain().rows[0].kernel == "standard torch.mm bfloat16, measured here"
    told.clear()
    optimizer.warmup(lambda *stage: told.append(stage))
    assert len(told) == 1  # nothing is measured twice


def test_a_warm_up_compiles_what_steps_run_whatever_is_around_it(kernel, measurements, monkeypatch):
    """Steps multiply without autocast."""
    module, seen = kernel.step.warmup, []
    run, note = module.polar_updates, lambda: seen.append(torch.is_autocast_enabled("cpu"))
    monkeypatch.setattr(module, "polar_updates", lambda members: note() or run(members))
    with torch.autocast("cpu", dtype=BF16):
        kernel.Muon([("w", Parameter(torch.ones(24, 40)))], ns_dtype=torch.float64).warmup(lambda *_: None)
    assert seen == [False]


def test_a_step_measures_nothing(kernel, tune, measurements, monkeypatch):
    monkeypatch.setattr(tune, "contest_of", lambda task: pytest.fail("measured in a step"))
    p = Parameter(torch.ones(24, 40))
    optimizer = kernel.Muon([("w", p)], ns_dtype=BF16)
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_frozen_parameters_take_no_time_of_a_warm_up(kernel, measurements):
    matrices = [("a.weight", Parameter(torch.ones(64, 96), False)), ("b.weight", Parameter(torch.ones(8, 16)))]
    told = []
    kernel.Muon(matrices).warmup(lambda done, total, what: told.append(what), budget=0)
    assert not any("64 x 96" in what for what in told) and any("8 x 16" in what for what in told)
