"""A lab that is ended by Ctrl-C or SIGTERM keeps what it has found, and blames nothing for its end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.lab.test_runner import stage
from tools.lab import prove, runner
from tools.lab.records import UNFINISHED, Record, Records, append


def test_an_item_that_was_running_has_not_failed(tmp_path, monkeypatch):
    """Its process is killed with the lab."""

    def run(stage: runner.Stage, *_) -> None:
        append(records.file, Record(stage.name, "right", "ok", 0.0))
        append(records.file, Record(stage.name, "running", "failed", 0.0, UNFINISHED.format("60")))
        raise KeyboardInterrupt

    records = Records(tmp_path, {"device": "toy"})
    monkeypatch.setattr(runner, "run", run)
    with pytest.raises(KeyboardInterrupt):
        runner.run_stage(stage(tmp_path, 60), records)
    assert {key: record.status for key, record in records.of("toy").items()} == {"right": "ok", "running": "cut"}


def write_log(command: list[str], *passed: str) -> None:
    """Write the log that a command of pytest is told to write, of tests that passed."""
    (log,) = (word.removeprefix("--report-log=") for word in command if word.startswith("--report-log="))
    report = {"$report_type": "TestReport", "when": "call", "outcome": "passed", "duration": 0.1, "longrepr": None}
    Path(log).write_text("".join(json.dumps({**report, "nodeid": node}) + "\n" for node in passed))


def test_verdicts_of_tests_stay(tmp_path, monkeypatch):
    """The next run begins a new log of pytest's."""

    def run(_, command: list[str], **__) -> None:
        write_log(command, "test_right")
        raise KeyboardInterrupt

    records = Records(tmp_path, {"device": "toy"})
    monkeypatch.setattr(prove, "run", run)
    with pytest.raises(KeyboardInterrupt):
        prove.prove(stage(tmp_path, 60), records)
    assert {key: record.status for key, record in records.of("prove").items()} == {"test_right": "ok"}


def killed(_, command: list[str], **__) -> None:
    write_log(command, "test_right")
    os.kill(os.getpid(), signal.SIGKILL)


def test_verdicts_of_a_killed_lab_are_those_of_its_commit_alone(tmp_path, monkeypatch):
    """They are recorded before the next run of that commit chooses its tests, even if one of another comes first."""
    toy = stage(tmp_path, 60)
    monkeypatch.setattr(prove, "run", killed)
    child = os.fork()
    if child == 0:
        try:
            prove.prove(toy, Records(tmp_path, {"commit": "a"}))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    monkeypatch.setattr(prove, "run", lambda _, command, **__: write_log(command, "test_last") or 0)
    for commit, known in ("b", []), ("a", ["test_right"]):
        records = Records(tmp_path, {"commit": commit})
        assert prove.prove(toy, records)
        assert (tmp_path / prove.PASSED).read_text().split() == known
        assert [*records.of("prove")] == [*known, "test_last", "pytest"]
