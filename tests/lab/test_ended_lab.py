"""A lab that is ended by Ctrl-C or SIGTERM keeps what it has found, and blames nothing for its end."""

from __future__ import annotations

import json

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


def test_verdicts_of_tests_stay(tmp_path, monkeypatch):
    """The next run begins a new log of pytest's."""
    report = {"$report_type": "TestReport", "when": "call", "outcome": "passed", "duration": 0.1, "longrepr": None}

    def run(*_, **__) -> None:
        (tmp_path / "prove.jsonl").write_text(json.dumps({**report, "nodeid": "test_right"}) + "\n")
        raise KeyboardInterrupt

    records = Records(tmp_path, {"device": "toy"})
    monkeypatch.setattr(prove, "run", run)
    with pytest.raises(KeyboardInterrupt):
        prove.prove(stage(tmp_path, 60), records)
    assert {key: record.status for key, record in records.of("prove").items()} == {"test_right": "ok"}
