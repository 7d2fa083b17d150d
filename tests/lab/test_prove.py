"""Tests that need a GPU are run to their end, or left for the next run, whatever one of them does to its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.lab.test_runner import stage
from tools.lab import prove as module
from tools.lab.prove import prove
from tools.lab.records import INTERRUPTED, Record, Records, append

TESTS = """
import os, time
from pathlib import Path

AGAIN = Path(__file__).with_name("again")

def test_right(): pass
def test_wrong(): assert 2 + 2 == 5
def test_hung(): AGAIN.exists() or time.sleep(600)
def test_dead(): AGAIN.exists() or os._exit(7)
def test_lost():
    if not AGAIN.exists():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_last():
    with Path(__file__).with_name("runs").open("a") as runs:
        runs.write("x")
"""


@pytest.mark.slow
def test_a_broken_test_is_recorded_and_the_rest_goes_on(tmp_path):
    records = Records(tmp_path, {"device": "toy"})
    file = tmp_path / "test_toy.py"
    file.write_text(TESTS)

    def statuses() -> dict[str, str]:
        toy = stage(tmp_path, 120)
        assert prove(toy, records, (str(file), f"--rootdir={tmp_path}"), limit=3), toy.log.read_text()
        return {key.rpartition("_")[2]: record.status for key, record in records.of("prove").items()}

    assert statuses() == {
        **dict.fromkeys(("wrong", "hung", "dead", "lost"), "failed"),
        "right": "ok",
        "last": "ok",
        "pytest": "ok",
    }
    assert all(
        "crashed" in record.problem for key, record in records.of("prove").items() if key.endswith(("dead", "lost"))
    )
    (tmp_path / "again").touch()
    assert {key for key, status in statuses().items() if status == "failed"} == {"wrong"}
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_named_and_the_rest_goes_on(tmp_path):
    records, broken = Records(tmp_path, {"device": "toy"}), tmp_path / "test_broken.py"
    (tmp_path / "test_toy.py").write_text("def test_right(): pass")
    broken.write_text("import no_such_module")
    arguments = (str(tmp_path), f"--rootdir={tmp_path}")
    assert prove(stage(tmp_path, 120), records, arguments)
    entries = records.of("prove")
    assert entries["test_toy.py::test_right"].status == "ok" and entries["pytest"].status == "failed"
    assert entries["pytest"].problem == "test_broken.py: ModuleNotFoundError: No module named 'no_such_module'"
    broken.write_text("def test_mended(): pass")
    assert prove(stage(tmp_path, 120), records, arguments)
    assert {record.status for record in records.of("prove").values()} == {"ok"} and len(records.of("prove")) == 3


@pytest.mark.slow
def test_every_file_imports_where_only_what_the_requirements_name_is_installed(repository):
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.bare_machine", "-p", "no:cacheprovider"]
    command += ["--collect-only", "-qq", "-m", "gpu or multi_gpu"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, module.NO_TESTS), done.stdout[-4000:]


@pytest.mark.slow
def test_tests_that_were_not_reached_are_left_for_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_SHARE", 1)
    records = Records(tmp_path, {"device": "toy"})
    file = tmp_path / "test_toy.py"
    file.write_text(TESTS)
    arguments = (str(file), f"--rootdir={tmp_path}")
    assert not prove(stage(tmp_path, 0.0), records, arguments)
    assert records.left("prove") == ["pytest"]
    assert not prove(stage(tmp_path, 15), records, arguments)
    left = {key.rpartition("_")[2]: records.of("prove")[key].problem for key in records.left("prove")}
    assert left == {"hung": INTERRUPTED, "dead": "", "lost": "", "last": ""}, (tmp_path / "lab.log").read_text()
    (tmp_path / "again").touch()
    assert prove(stage(tmp_path, 120), records, arguments)
    assert [key.rpartition("_")[2] for key, each in records.of("prove").items() if each.status == "failed"] == ["wrong"]


@pytest.mark.slow
def test_tests_after_too_many_crashes_are_left_for_the_next_run(tmp_path, monkeypatch):
    """Then pytest stops before its time is over."""
    monkeypatch.setattr(module, "RESTARTS", 0)
    records, file = Records(tmp_path, {"device": "toy"}), tmp_path / "test_toy.py"
    file.write_text(TESTS)
    toy = stage(tmp_path, 120)
    assert not prove(toy, records, (str(file), f"--rootdir={tmp_path}", "-k", "right or dead or last"))
    statuses = {key.rpartition("_")[2]: record.status for key, record in records.of("prove").items()}
    assert statuses == {"right": "ok", "dead": "failed", "last": "cut", "pytest": "ok"}, toy.log.read_text()
    assert time.monotonic() < toy.until


ORDERED = """
import os
from pathlib import Path

import pytest

@pytest.mark.parametrize("name", ["failed", "interrupted", "cut", "passed", "dead", *"abcdefgh"])
def test_any(name):
    with Path(__file__).with_name("order").open("a") as order:
        order.write(f"{name} ")
    name == "dead" and os._exit(7)
"""


@pytest.mark.slow
def test_a_test_that_was_tried_runs_after_all_that_were_not(tmp_path):
    """Whatever it does to its process again, the others have run. A worker that ends changes nothing."""
    records, file = Records(tmp_path, {"device": "toy"}), tmp_path / "test_toy.py"
    file.write_text(ORDERED)
    for name, status, problem in (
        ("failed", "failed", "worker 'gw0' crashed"), ("interrupted", "cut", INTERRUPTED), ("cut", "cut", ""),
        ("passed", "ok", ""),
    ):  # fmt: skip
        append(records.file, Record("prove", f"test_toy.py::test_any[{name}]", status, 0.0, problem))
    toy = stage(tmp_path, 120)
    assert prove(toy, records, (str(file), f"--rootdir={tmp_path}")), toy.log.read_text()
    assert (tmp_path / "order").read_text().split() == ["cut", "dead", *"abcdefgh", "interrupted", "failed"]


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """A function that runs a stage of a minute, in which pytest is still at the given test when time ends.

    It returns the test's record and what pytest was told.
    """
    commands = []

    def run(_, command: list[str], **__) -> None:
        commands.append(command)
        (tmp_path / module.CHOSEN).write_text("a\nb")
        (tmp_path / module.RUNNING).write_text("a")

    records = Records(tmp_path, {"device": "toy"})
    monkeypatch.setattr(module, "run", run)

    def run_once() -> tuple[Record, list[str]]:
        assert not prove(stage(tmp_path, 60), records)
        return records.of("prove")["a"], commands[-1]

    return run_once


def test_a_test_that_runs_out_of_time_twice_has_failed(hung):
    """The first time may have come at its first second."""
    assert [hung()[0].status for _ in range(3)] == ["cut", "failed", "failed"]
    assert hung()[0].problem == f"{INTERRUPTED}, as in an earlier run"


def test_a_test_that_hangs_ends_in_a_third_of_the_time(hung):
    (limit,) = (word for word in hung()[1] if word.startswith("--timeout="))
    assert 19 <= float(limit.partition("=")[2]) <= 20
