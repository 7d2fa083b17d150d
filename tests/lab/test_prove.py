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
from tools.lab.records import Records

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
    given = (str(tmp_path), f"--rootdir={tmp_path}")
    assert prove(stage(tmp_path, 120), records, given)
    found = records.of("prove")
    assert found["test_toy.py::test_right"].status == "ok" and found["pytest"].status == "failed"
    assert found["pytest"].problem == "test_broken.py: ModuleNotFoundError: No module named 'no_such_module'"
    broken.write_text("def test_mended(): pass")
    assert prove(stage(tmp_path, 120), records, given)
    assert {record.status for record in records.of("prove").values()} == {"ok"} and len(records.of("prove")) == 3


@pytest.mark.slow
def test_every_file_imports_where_only_what_the_requirements_name_is_installed(repository):
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.bare_machine", "-p", "no:cacheprovider"]
    command += ["--collect-only", "-qq", "-m", "gpu or multi_gpu"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, module.NO_TESTS), done.stdout[-4000:]


@pytest.mark.slow
def test_tests_that_were_not_reached_are_left_for_the_next_run(tmp_path):
    records = Records(tmp_path, {"device": "toy"})
    file = tmp_path / "test_toy.py"
    file.write_text(TESTS)
    given = (str(file), f"--rootdir={tmp_path}")
    assert not prove(stage(tmp_path, 0.0), records, given)
    assert records.left("prove") == ["pytest"]
    assert not prove(stage(tmp_path, 15), records, given)
    names = [key.rpartition("_")[2] for key in records.left("prove")]
    assert names == ["hung", "dead", "lost", "last"], (tmp_path / "lab.log").read_text()
    (tmp_path / "again").touch()
    assert prove(stage(tmp_path, 120), records, given)
    assert [key.rpartition("_")[2] for key, each in records.of("prove").items() if each.status == "failed"] == ["wrong"]


@pytest.mark.slow
def test_tests_after_too_many_crashes_are_left_for_the_next_run(tmp_path, monkeypatch):
    """Then pytest stops before its time is over."""
    monkeypatch.setattr(module, "RESTARTS", 0)
    records, file = Records(tmp_path, {"device": "toy"}), tmp_path / "test_toy.py"
    file.write_text(TESTS)
    toy = stage(tmp_path, 120)
    assert not prove(toy, records, (str(file), f"--rootdir={tmp_path}", "-k", "right or dead or last"))
    found = {key.rpartition("_")[2]: record.status for key, record in records.of("prove").items()}
    assert found == {"right": "ok", "dead": "failed", "last": "cut", "pytest": "ok"}, toy.log.read_text()
    assert time.monotonic() < toy.until
