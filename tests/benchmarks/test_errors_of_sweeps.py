"""A case that raises costs a sweep no other case: the error becomes its row, and later runs try it last."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import (
    peers,
    sweep_bookkeeping,
    sweep_orthogonalize,
    sweep_portable,
    sweep_step,
    sweep_symmetric_gemm,
    sweep_training_step,
)
from benchmarks.lost_gpu import blaming
from benchmarks.result_file import ResultFile
from benchmarks.sweep_options import measure_cases
from benchmarks.timing import Deadline, run_rounds
from tests.support.proofs import race
from tools.lab import measure
from tools.lab.items import FailedError
from tools.pages.tables import sweep_tables

CASES = ("a",), ("b", "c"), ("d",)
WRONG, LOST = RuntimeError("it is\ntoo large"), RuntimeError("CUDA error: an illegal memory access")
TORCH = "torch.optim.Muon"


class Sweep:
    """Runs over the cases of one results file, in which `errors` are raised; `tried` are the last run's cases."""

    def __init__(self, file: Path):
        self.file, self.tried = file, []

    def run(self, errors: dict[str, Exception]) -> dict[str, str]:
        """Return the status of each row."""
        self.tried = []
        results = ResultFile(self.file, {}, [key for case in CASES for key in case])
        measure_cases(results, {case: lambda case=case: self._rows(case, errors) for case in CASES}, Deadline())
        return self.statuses()

    def statuses(self) -> dict[str, str]:
        return {row["case"]: row["status"] for row in json.loads(self.file.read_text())["results"]}

    def _rows(self, case: tuple[str, ...], errors: dict[str, Exception]) -> Iterator[tuple[str, dict]]:
        self.tried.append(case)
        for key in case:
            if key in errors:
                raise errors[key]
            yield key, {}


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path / "results.json")


def test_an_error_becomes_one_line_of_its_rows_and_the_sweep_goes_on(sweep, capsys):
    """Rows that the case had until then stay measured."""
    line = "error: RuntimeError: it is too large"
    assert sweep.run({"c": WRONG}) == {"a": "measured", "b": "measured", "c": line, "d": "measured"}
    assert capsys.readouterr().err.endswith(f"c: {line}\n")


def test_a_later_run_tries_rows_with_an_error_last(sweep):
    with pytest.raises(KeyboardInterrupt):
        sweep.run({"a": WRONG, "b": KeyboardInterrupt()})
    assert set(sweep.run({}).values()) == {"measured"} and sweep.tried == [("b", "c"), ("d",), ("a",)]


def test_a_lost_gpu_ends_the_run_and_the_next_one_begins_behind_it(sweep):
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sweep.run({"a": LOST})
    assert sweep.statuses()["a"].startswith("error: RuntimeError: CUDA error") and sweep.tried == [("a",)]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sweep.run({"a": LOST})
    assert sweep.tried == [("b", "c"), ("d",), ("a",)]


PROGRAMS = (
    sweep_bookkeeping, sweep_orthogonalize, sweep_portable, sweep_step, sweep_symmetric_gemm, sweep_training_step,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_sweep_prints_its_errors_and_fails(program, variant, tmp_path, monkeypatch, capsys):
    def wrong(*arguments):
        raise RuntimeError("[/no] such thing")

    file = tmp_path / "results.json"
    monkeypatch.setattr(program, "measure", wrong)
    monkeypatch.setattr(sys, "argv", ["sweep", "--tiny", "--build", str(variant.parent), "--output", str(file)])
    assert program.main() == 1
    rows = json.loads(file.read_text())["results"]
    assert {row["status"] for row in rows} == {"error: RuntimeError: [/no] such thing"}
    assert "[/no]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "program, finder",
    [
        (sweep_orthogonalize, "find_contestant"),
        (sweep_step, "find_rival"),
        (sweep_training_step, "find_rival"),
    ],
)
def test_a_peer_that_loses_the_gpu_ends_the_sweep_and_is_not_launched_again(
    program, finder, variant, tmp_path, monkeypatch, capsys
):
    """What was measured before stays, and in the next run its mark says why it was left out."""
    file, tried, find = tmp_path / "results.json", [], getattr(program, finder)

    def losing(name: str, *arguments):
        tried.append(name)
        if name == TORCH:
            raise LOST
        return find(name, *arguments)

    monkeypatch.setattr(program, finder, losing)
    places = ["--build", str(variant.parent), "--output", str(file)]
    monkeypatch.setattr(sys, "argv", ["sweep", "--tiny", "--contestants", TORCH, *places])
    with pytest.raises(race.LostGpuError, match=f"^{TORCH}: RuntimeError: CUDA error: an illegal memory access"):
        program.main()
    first = json.loads(file.read_text())["results"][0]
    assert first["status"] == f"error: LostGpuError: {TORCH}: RuntimeError: {LOST}"
    assert program.main() == 0 and tried.count(TORCH) == 1 < len(tried)
    mark = f"lost the GPU at {first['case']}: RuntimeError: {LOST}"
    assert mark in file.read_text() and '"error: ' not in file.read_text() and "lost" in capsys.readouterr().out


def test_a_peer_of_a_training_step_may_lose_the_gpu_in_a_round(variant, tmp_path, monkeypatch):
    """A round has two works of each contestant, and the mark is for the contestant."""
    file, tried, make = tmp_path / "results.json", [], sweep_training_step.make_training

    def losing(name: str, *arguments):
        tried.append(name)
        return make(name, *arguments)._replace(**({"step": lose} if name == TORCH else {}))

    monkeypatch.setattr(sweep_training_step, "make_training", losing)
    places = ["--build", str(variant.parent), "--output", str(file)]
    monkeypatch.setattr(sys, "argv", ["sweep", "--tiny", "--contestants", TORCH, *places])
    with pytest.raises(race.LostGpuError, match=f"^{TORCH}: RuntimeError: CUDA error"):
        sweep_training_step.main()
    assert sweep_training_step.main() == 0 and tried.count(TORCH) == 1


def lose() -> None:
    raise LOST


def test_a_lost_gpu_ends_the_run_whatever_its_error_begins_with():
    """What is kept of its text is the beginning, which need not say that it is CUDA's."""
    results = ResultFile(None, {}, ["a", "b"])
    works = {("a",): partial(lose_with, "a graph that is long to describe: " * 10), ("b",): dict}
    with pytest.raises(race.LostGpuError):
        measure_cases(results, works, Deadline(), ["peer"])
    assert results.lost.keys() == {"peer"} and not results.is_measured("b")


def lose_with(beginning: str) -> None:
    with blaming("peer"):
        raise RuntimeError(f"{beginning}{LOST}")


def test_whoever_loses_the_gpu_is_named(monkeypatch):
    """Errors of kernels are raised later, and libraries have names of their own for them: the GPU knows."""

    def step(name: str) -> None:
        if name == "peer":
            monkeypatch.setattr(torch.cuda, "synchronize", lose)
            raise AssertionError("driver error 700")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {
        "admitted": lambda: peers.admit([peers.OURS, "peer"], step, {}),
        "timed": lambda: run_rounds(
            {n: partial(step, n) for n in ("ours", "peer")}, torch.device("cpu"), 1, Deadline()
        ),
    }
    for call in calls.values():
        with pytest.raises(race.LostGpuError, match=r"^peer: RuntimeError: CUDA error: an illegal") as error:
            call()
        assert error.value.name == "peer"
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_ours_is_launched_again_whatever_it_lost(tmp_path):
    names = "optimizer", "optimizer, warmed up", "torch.compile"
    for name in names:
        results = ResultFile(tmp_path / "results.json", {}, ["a"])
        with pytest.raises(race.LostGpuError):
            measure_cases(results, {("a",): partial(lose_by, name)}, Deadline(), names)
    assert ResultFile(tmp_path / "results.json", {}, ["a"]).lost == {"torch.compile": f"lost the GPU at a: {LOST}"}


def lose_by(name: str) -> None:
    raise race.LostGpuError(name, str(LOST))


def test_pages_count_rows_with_an_error_as_they_count_unmeasured_ones():
    measured = {"case": "a", "status": "measured", "load_seconds": [1.0, 2.0, 3.0]}
    rows = [measured, {"case": "b", "status": "error: RuntimeError: too large"}, {"case": "c", "status": "unmeasured"}]
    (table,) = sweep_tables({"results": rows})
    assert table.rows == [("a", "2.00 (1.00-3.00)")]
    assert table.title == "Time to load, 1 of 3 unmeasured, 1 of 3 with an error"


def test_the_lab_fails_a_sweep_with_an_error_in_a_row_whose_case_it_names(tmp_path):
    content = {"results": [{"case": "a", "status": "error: RuntimeError: too large"}]}
    file = tmp_path / "results.json"
    for status in (measure.OUT_OF_TIME, "status 1"):
        file.write_text(json.dumps(content))
        with pytest.raises(FailedError, match=f"{status}; a: error: RuntimeError: too large") as error:
            measure.judged(status, "the last line of a long error", file)
        assert error.value.value == {"ended": status, **content}
