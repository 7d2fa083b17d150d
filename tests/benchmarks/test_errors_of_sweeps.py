"""A case that raises costs a sweep no other case: the error becomes its row, and later runs try it last."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import (
    sweep_bookkeeping,
    sweep_orthogonalize,
    sweep_portable,
    sweep_step,
    sweep_symmetric_gemm,
    sweep_training_step,
)
from benchmarks.result_file import ResultFile
from benchmarks.sweep_options import measure_cases
from benchmarks.timing import Deadline
from tools.lab import measure
from tools.lab.items import FailedError
from tools.pages.tables import sweep_tables

CASES = ("a",), ("b", "c"), ("d",)
WRONG, LOST = RuntimeError("it is\ntoo large"), RuntimeError("CUDA error: an illegal memory access")


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


def test_pages_count_rows_with_an_error_as_they_count_unmeasured_ones():
    measured = {"case": "a", "status": "measured", "load_seconds": [1.0, 2.0, 3.0]}
    rows = [measured, {"case": "b", "status": "error: RuntimeError: too large"}, {"case": "c", "status": "unmeasured"}]
    (table,) = sweep_tables({"results": rows})
    assert table.rows == [("a", "2.00 (1.00-3.00)")]
    assert table.title == "Time to load, 1 of 3 unmeasured, 1 of 3 with an error"


def test_the_lab_fails_a_sweep_that_was_stopped_with_an_error_in_a_row(tmp_path):
    content = {"results": [{"case": "a", "status": "error: RuntimeError: too large"}]}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content))
    with pytest.raises(FailedError, match="out of time; a: error: RuntimeError: too large") as found:
        measure.judged(measure.OUT_OF_TIME, "stopped", file)
    assert found.value.value == {"ended": measure.OUT_OF_TIME, **content}
