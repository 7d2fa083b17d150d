"""What says nothing of a candidate: want of memory, a full disk, and an interrupt."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.tuning.conftest import EVEN, chosen, run, tasks


def test_want_of_memory_leaves_a_size_as_it_was(kernel, tune, measurements, monkeypatch):
    def too_large(task):
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(tune, "contest_of", too_large)
    told = run(tune.Tuner(60.0), tune, tasks(kernel, (24, 40)))
    assert "too little free memory" in told[0] and chosen(kernel, 24, 40).source == "by default"


def test_want_of_memory_names_no_candidate_that_had_failed_before(kernel, tune, measurements, monkeypatch):
    def too_large(task):
        raise torch.cuda.OutOfMemoryError("out of memory")

    (task,), file = tasks(kernel, (24, 40)), kernel.kernels.speeds.measurement_file
    key, failed = kernel.kernels.speeds.machine.key_of(task.device), {("cpu_products", "bfloat16"): {"NATIVE": "wrong"}}
    measurements.keep(key, file.Table({}, failed))
    monkeypatch.setattr(tune, "contest_of", too_large)
    assert not tune.Tuner(60.0).measure(task, 0).failed


def test_nothing_is_kept_of_a_size_of_which_nothing_was_found(kernel, measurements):
    """Else plans and launches that are kept would be made anew."""
    (task,), before = tasks(kernel, (24, 40)), measurements.changed()
    kernel.tuning.findings.store(task, None, {})
    assert measurements.changed() == before


def test_a_wrong_candidate_is_remembered_where_nothing_could_be_timed(
    kernel, measurements, tune, contests, table_clock
):
    contests["NATIVE"] = kernel.tuning.proof.WrongResultError("wrong")
    clock = table_clock(EVEN)
    clock.ready = lambda work: work.no_such_work  # raises
    told = run(tune.Tuner(60.0, clock), tune, tasks(kernel, (24, 40)))[0]
    assert all(why in told for why in ("nothing could be timed (NATIVE: wrong; ", "SINGLE: AttributeError: "))
    measurements.forget()
    failed = measurements.failed(kernel.kernels.speeds.machine.key_of(torch.device("cpu")), "cpu_products", "bfloat16")
    assert failed == {"NATIVE": "wrong"}


@pytest.mark.parametrize("problem", ["can't allocate memory", "No space left on device"])
def test_accidents_convict_no_candidate(kernel, measurements, monkeypatch, problem):
    def unlucky(*arguments):
        raise RuntimeError(problem)

    monkeypatch.setattr(kernel.tuning.contest, "_prove_table", unlucky)
    kernel.tune([(24, 40)], device="cpu", dtype=torch.bfloat16, budget=5, progress=lambda *_: None)
    measurements.forget()
    assert not measurements.failed(
        kernel.kernels.speeds.machine.key_of(torch.device("cpu")), "cpu_products", "bfloat16"
    )


@pytest.mark.parametrize(
    "problem", [MemoryError("bad_alloc"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_a_wrong_candidate_is_remembered_whatever_comes_after_it(kernel, measurements, tune, contests, problem):
    """NATIVE is the default."""

    def happen():
        raise problem

    contests.update(NATIVE=kernel.tuning.proof.WrongResultError("wrong"), NATIVE_SYMMETRIC=happen)
    tuner = tune.Tuner(60.0)
    with pytest.raises(KeyboardInterrupt) if isinstance(problem, KeyboardInterrupt) else contextlib.nullcontext():
        assert run(tuner, tune, tasks(kernel, (24, 40)))[-1].endswith("failed their proof: NATIVE (wrong)")
    measurements.forget()
    failed = measurements.failed(kernel.kernels.speeds.machine.key_of(torch.device("cpu")), "cpu_products", "bfloat16")
    assert failed == {"NATIVE": "wrong"}


def test_what_goes_wrong_twice_is_no_accident(kernel, tune, measurements, contests, table_clock):
    """Else every call would try again, for as long as its budget lasts, what never works on this machine."""
    contests.update(dict.fromkeys(("NATIVE", "NATIVE_SYMMETRIC"), OSError("No space left on device")))
    for left in True, False:
        run(tune.Tuner(60.0, table_clock(EVEN)), tune, tune.unmeasured(tasks(kernel, (24, 40))))
        assert bool(tune.unmeasured(tasks(kernel, (24, 40)))) is left
    assert chosen(kernel, 24, 40).name == "torch.mm"


def test_accidents_are_tried_again(kernel, tune, measurements, contests, table_clock):
    contests.update(dict.fromkeys(("NATIVE", "NATIVE_SYMMETRIC"), OSError("No space left on device")))
    run(tune.Tuner(60.0, table_clock(EVEN)), tune, tasks(kernel, (24, 40)))
    assert chosen(kernel, 24, 40).name == "torch.mm"
    contests.clear()
    run(tune.Tuner(60.0, table_clock({**EVEN, "NATIVE": 0.1})), tune, tune.unmeasured(tasks(kernel, (24, 40))))
    assert chosen(kernel, 24, 40).name != "torch.mm"


def test_a_size_that_another_process_has_measured_meanwhile_is_measured_anew(
    kernel, measurements, tune, contests, table_clock
):
    (task,) = tasks(kernel, (24, 40))
    for fastest in ("NATIVE_SYMMETRIC", "SINGLE"):
        assert tune.Tuner(60.0, table_clock({**EVEN, fastest: 0.1})).measure(task, 0).entry["products"] == fastest
        measurements.forget()
    assert not tune.unmeasured([task])
