"""A stage of the lab lives through what may happen on a GPU: items that hang, die, or cannot be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.hub_clients import write_variant
from tools.lab import runner, stages
from tools.lab.records import INTERRUPTED, UNFINISHED, Record, Records, append
from tools.lab.runner import Stage, run_stage

STAGE = """
import os, time
from pathlib import Path
from tools.lab.items import FailedError, Item

def stop():
    raise FailedError("two and two are five", {"sum": 5})

def items(lab):
    again = (lab.out / "again").exists()
    yield Item("right", lambda: {"answer": 4})
    yield Item("everywhere", lambda: (lab.out / "starts").open("a").write("x"), again=True)
    yield Item("wrong", stop)
    yield Item("broken", lambda: {}["nothing"])
    yield Item("hung", lambda: again or time.sleep(600), limit=60 if again else 0.5)
    yield Item("dead", lambda: again or (os.write(2, b"no more"), os._exit(7)))
    yield Item("killed", lambda: again or os.kill(os.getpid(), 9))
    yield Item("stuck", lambda: again or time.sleep(600), limit=60 if again else 0.5, again=True)
    yield Item("last", lambda: {"runs": len((lab.out / "runs").open("a+").write("x") * "x")})
"""


# Its first item needs two runs for its two parts.
IN_PARTS = """
from tools.lab.items import CutError, Item
from tools.lab.records import FILE, read

def count(lab):
    (earlier,) = (record.value for record in read(lab.out / FILE)[1] if record.key == "parts")
    parts = (earlier or 0) + 1
    if parts < 2:
        raise CutError(f"{parts} of 2 parts", parts)
    return parts

def items(lab):
    yield Item("parts", lambda: count(lab))
    yield Item("last", lambda: "reached")
"""


def stage(out: Path, seconds: float, items: str = STAGE) -> Stage:
    """The toy stage, over a toy kernel that loads at once."""
    out.mkdir(exist_ok=True)
    (out / "toy_stage.py").write_text(items)
    write_variant(out / "variants/torch-cpu", "0000007", factor=2)
    order = {"variants": str(out / "variants"), "device": "cpu", "out": str(out), "configs": [], "tiny": False}
    return Stage("toy", "toy_stage", order, time.monotonic() + seconds, out / "lab.log")


@pytest.fixture
def toy_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_broken_item_is_recorded_and_the_rest_goes_on(toy_path):
    records = Records(toy_path, {"device": "toy"})
    assert run_stage(stage(toy_path, 120), records)
    entries = records.of("toy")
    assert {key: entries[key].status for key in ("right", "last")} == {"right": "ok", "last": "ok"}
    problems = {key: record.problem for key, record in entries.items() if record.status == "failed"}
    assert problems.pop("wrong") == "two and two are five" and problems.pop("broken").startswith("KeyError")
    assert problems.pop("hung").startswith(
        "it ended its process, or did not end in 0.5 s; its process ended with status 1"
    )
    assert problems.pop("stuck").startswith("it ended its process, or did not end in 0.5 s")
    assert problems.pop("dead").endswith("in 60 s; its process ended with status 7: no more")
    assert problems.pop("killed").endswith("in 60 s; its process ended with status -9 (SIGKILL): it said nothing")
    assert not problems and entries["right"].value == {"answer": 4} and entries["wrong"].value == {"sum": 5}

    (toy_path / "again").touch()
    resumed = Records(toy_path, {"device": "toy"})
    assert run_stage(stage(toy_path, 120), resumed)
    assert {key for key, record in resumed.of("toy").items() if record.status == "failed"} == {"wrong", "broken"}
    assert (toy_path / "runs").read_text() == "x"
    assert (toy_path / "starts").read_text() == "xx"  # once in each run, which have several processes


@pytest.mark.slow
def test_a_stage_ends_with_its_time_and_the_next_run_does_what_is_left(toy_path, capsys):
    """The end of its time says nothing about the item that was running."""
    records = Records(toy_path, {"device": "toy"})
    began = time.monotonic()
    assert not run_stage(stage(toy_path, 8.0, STAGE.replace("else 0.5", "else 600")), records)
    assert time.monotonic() - began < 12 and "its time is over" in capsys.readouterr().out
    entries = records.of("toy")
    assert records.left("toy") == ["hung", "dead", "killed", "stuck", "last"]
    assert entries["hung"].problem == INTERRUPTED and entries["wrong"].status == "failed"

    (toy_path / "again").touch()
    assert run_stage(stage(toy_path, 120), records)
    assert {key for key, record in records.of("toy").items() if record.status != "ok"} == {"wrong", "broken"}


@pytest.mark.slow
def test_a_cut_item_goes_on_from_what_it_had(toy_path):
    records = Records(toy_path, {"device": "toy"})
    assert not run_stage(stage(toy_path, 120, IN_PARTS), records)
    cut = records.of("toy")["parts"]
    assert (cut.status, cut.problem, cut.value) == ("cut", "1 of 2 parts", 1)
    assert records.of("toy")["last"].status == "ok" and records.left("toy") == ["parts"]
    assert run_stage(stage(toy_path, 120, IN_PARTS), records)
    assert (records.of("toy")["parts"].status, records.of("toy")["parts"].value) == ("ok", 2)


def test_only_an_item_that_is_running_is_cut(tmp_path):
    records = Records(tmp_path, {"device": "toy"})
    died = "it ended its process, or did not end in 60 s; its process ended with status 1: it took 9 s"
    for key, problem in (("died", died), ("runs", died.partition(";")[0]), ("wrong", "five")):
        append(records.file, Record("toy", key, "failed", 0.0, problem, value=[1]))
    runner.cut_running(records, "toy", 0.0)
    assert records.left("toy") == ["runs"] and records.of("toy")["runs"].value == [1]


@pytest.mark.parametrize(
    "recorded, ended",
    [({}, False), ({"start": "failed"}, False), ({"a": "ok", "b": "cut"}, False), ({"a": "ok", "b": "failed"}, True)],
)
def test_a_stage_whose_last_item_ends_with_its_time_has_nothing_left(tmp_path, monkeypatch, recorded, ended):
    """A process that was killed before it listed its items has not come to its end."""

    def run(stage: Stage, *_) -> None:
        for key, status in recorded.items():
            append(records.file, Record(stage.name, key, status, 0.0))

    records = Records(tmp_path, {"device": "toy"})
    monkeypatch.setattr(runner, "run", run)
    assert run_stage(stage(tmp_path, 60), records) == ended


@pytest.mark.parametrize("failed, left, status", [(0, [], 0), (1, [], 1), (1, ["tune"], 1), (0, ["tune"], 2)], ids=str)
def test_exit_status_tells_failures_from_a_lack_of_time(tmp_path, monkeypatch, capsys, failed, left, status):
    """Every stage is a stand-in that has ended, except for those that are `left`."""

    def run(stage: Stage, records: Records) -> bool:
        for key in "abcd" if stage.name in left else ():
            append(records.file, Record(stage.name, key, "cut", 0.0))
        return stage.name not in left

    monkeypatch.setattr(stages, "prepare", lambda *_: tmp_path)
    monkeypatch.setattr(stages, "identity", lambda *_: {"device": "toy"})
    monkeypatch.setattr(stages, "find_variant", lambda folder: folder)
    monkeypatch.setattr(stages, "prove", run)
    monkeypatch.setattr(stages, "run_stage", run)
    monkeypatch.setattr(stages, "write_report", lambda *_: failed)
    monkeypatch.setattr(stages.signal, "signal", lambda *_: None)
    monkeypatch.setattr(stages.sys.stdout, "reconfigure", lambda **_: None, raising=False)
    assert stages.run_stages(["--out", str(tmp_path)]) == status
    assert ("[tune] 4 left: a, b, c and 1 more" in capsys.readouterr().out) == bool(left)


def test_a_file_in_the_place_of_the_folder_for_records_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(stages.signal, "signal", lambda *_: None)
    monkeypatch.setattr(stages.sys.stdout, "reconfigure", lambda **_: None, raising=False)
    assert stages.run_stages(["--out", str(tmp_path / "file")]) == stages.FAILED
    assert "gpu-lab: [Errno 17] File exists" in capsys.readouterr().err


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Records of a run before this one, and a list of what each process of this run records and how it ends."""
    ends: list[tuple[dict[str, str], int | None]] = []

    def run(stage: Stage, *_) -> int | None:
        stage.log.touch()
        recorded, status = ends.pop(0)
        for key, how in recorded.items():
            problem = UNFINISHED.format("60") if how == "failed" else ""
            append(records.file, Record(stage.name, key, how, 0.0, problem))
        return status

    records = Records(tmp_path, {"device": "toy"})
    for key, status in ("check", "ok"), ("start", "failed"), ("a", "cut"):
        append(records.file, Record("toy", key, status, 0.0, at=0.0))
    monkeypatch.setattr(runner, "run", run)
    return records, ends


def test_a_repeated_item_that_ends_its_process_does_not_end_the_stage(tmp_path, processes):
    """Its record says as before that it need not run again."""
    records, ends = processes
    ends += [({"check": "failed"}, 1), ({"a": "ok"}, 0)]
    assert run_stage(stage(tmp_path, 60), records)
    statuses = {key: record.status for key, record in records.of("toy").items()}
    assert statuses == {"check": "failed", "start": "ok", "a": "ok"} and not ends
    assert "its process ended with status 1" in records.of("toy")["check"].problem


@pytest.mark.parametrize(
    "recorded, status, start",
    [({"a": "ok"}, 0, "ok"), ({"a": "ok"}, None, "ok"), ({}, 0, "ok"), ({}, None, "failed"), ({}, 1, "failed")],
)
def test_a_stage_that_starts_replaces_the_record_of_why_it_could_not(tmp_path, processes, recorded, status, start):
    records, ends = processes
    ends.append((recorded, status))
    run_stage(stage(tmp_path, 60), records)
    assert records.of("toy")["start"].status == start


@pytest.mark.slow
def test_a_stage_that_cannot_start_says_why(toy_path):
    records = Records(toy_path, {"device": "toy"})
    toy = stage(toy_path, 60.0)
    (toy_path / "toy_stage.py").write_text("raise ValueError('not today')")
    assert not run_stage(toy, records)
    assert records.of("toy")["start"].problem.endswith("status 1: ValueError: not today")


def test_a_process_that_cannot_be_killed_holds_nothing_up(tmp_path, monkeypatch):
    """As one that waits in the driver behind a kernel that hangs."""
    monkeypatch.setattr(runner, "END_SECONDS", 0.1)
    monkeypatch.setattr(runner.os, "killpg", lambda process, signal: None)
    program = "import os, time; open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid'); time.sleep(60)"
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    began = time.monotonic()
    assert runner.run(stage(tmp_path, 2.0), [sys.executable, "-c", program]) is None
    assert time.monotonic() - began < 10
    while not (tmp_path / "pid").exists():  # where all cores are busy a process may take seconds to start
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


TRIAL = """
import os, pathlib, sys, time
mark = pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "optimizer/a.trial"
mark.parent.mkdir(parents=True)
mark.touch()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("sleeps, kept", [(0, True), (600, False)], ids=["it ends", "its time is over"])
def test_only_what_ends_a_process_is_left_out(tmp_path, sleeps, kept):
    """A mark of a candidate that is being tried stays where its process ends by itself."""
    order = {"variants": "", "device": "cpu", "out": str(tmp_path), "configs": [], "tiny": False}
    toy = Stage("toy", "toy_stage", order, time.monotonic() + (60 if kept else 2), tmp_path / "lab.log")
    assert runner.run(toy, [sys.executable, "-c", TRIAL, str(sleeps)]) == (0 if kept else None)
    assert (tmp_path / "caches/optimizer/a.trial").exists() == kept
