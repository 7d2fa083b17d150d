"""Candidates that hang or end their process: they are named, and the next process leaves them out."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.rank_pool import load_kernel

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:.*is left out from now on:RuntimeWarning")


@pytest.fixture
def need(kernel):
    return kernel.kernels.speeds.measurement_file.Need("cpu_products", "bfloat16", 24, 40)


def marks() -> list[Path]:
    return list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.trial"))


def try_for_long(variants: str, threads: int, patience: float, started) -> None:
    torch.set_num_threads(threads)
    kernel = load_kernel(Path(variants))
    need = kernel.kernels.speeds.measurement_file.Need("cpu_products", "bfloat16", 24, 40)
    kernel.kernels.speeds.trials.PATIENCE_SECONDS = patience
    with kernel.kernels.speeds.trials.trial(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE"):
        while not any('"overdue": true' in mark.read_text() for mark in marks()):
            time.sleep(0.01)
        started.set()
        time.sleep(600)


def end_a_trial(kernel, measurements, patience: float) -> None:
    """Kill a process in its trial, which is overdue."""
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    variants = str(Path(kernel.__file__).parents[1])
    process = context.Process(target=try_for_long, args=(variants, torch.get_num_threads(), patience, started))
    process.start()
    assert started.wait(120)
    measurements.forget()
    failed_meanwhile = measurements.failed(kernel.kernels.speeds.machine.key_of(CPU), "cpu_products", "bfloat16")
    assert not failed_meanwhile  # while the process lives, it only tries
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def failures(kernel, measurements) -> dict:
    measurements.forget()
    return dict(measurements.failed(kernel.kernels.speeds.machine.key_of(CPU), "cpu_products", "bfloat16"))


def test_what_hung_is_left_out_by_the_next_process(kernel, measurements):
    end_a_trial(kernel, measurements, patience=0.1)
    with pytest.warns(RuntimeWarning, match="NATIVE in bfloat16 is left out from now on: the process"):
        failures(kernel, measurements)
    with warnings.catch_warnings(action="error"):  # the mark goes, what it said stays
        assert "did not come to its end" in failures(kernel, measurements)["NATIVE"]
    assert not marks()


def test_a_process_that_was_ended_once_convicts_nobody(kernel, measurements, need):
    """Schedulers end processes, too: only the second time counts."""
    key = kernel.kernels.speeds.machine.key_of(CPU)
    mark = kernel.kernels.speeds.trials._mark(key, need, "NATIVE")
    content = {**json.loads(mark.read_text()), "since": "before"}  # of a process that had this one's number
    for expected in (set(), {"NATIVE"}):
        mark.write_text(json.dumps(content))
        assert failures(kernel, measurements).keys() == expected
    assert {path.suffix for path in mark.parent.iterdir()} == {".json", ".once"}  # no mark in any form


def test_a_mark_of_another_machine_is_left_to_it(kernel, measurements, need, monkeypatch):
    """Machines may share a folder: there the number may be that of no process here."""
    mark = kernel.kernels.speeds.trials._mark(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before", "overdue": True}))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("platform.node", lambda: "another")
        assert not failures(kernel, measurements) and marks()
    assert "NATIVE" in failures(kernel, measurements)


@pytest.mark.skipif(not Path("/proc/uptime").exists(), reason="only Linux says it")
def test_a_process_is_known_by_when_it_began(kernel, tmp_path, monkeypatch):
    """Its name may be anything. That of a container is when its first process began."""
    trials, script = kernel.kernels.speeds.trials, tmp_path / "a) b 1 2"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    with subprocess.Popen([script], stdin=subprocess.PIPE) as process:
        began = [booted + int(trials._start_of(each)) / os.sysconf("SC_CLK_TCK") for each in (os.getpid(), process.pid)]
    assert began[0] - 1 <= began[1] and abs(time.time() - began[1]) < 60
    monkeypatch.setattr(trials, "_start_of", lambda process: str(1000 * os.sysconf("SC_CLK_TCK")))
    assert abs(booted + 1000 - trials._start_of_this_container()) < 60


def test_marks_of_threads_and_of_candidates_in_other_dtypes_are_told_apart(kernel, measurements, need):
    trials, key = kernel.kernels.speeds.trials, kernel.kernels.speeds.machine.key_of(CPU)
    made = [trials._mark(key, need, "NATIVE")]
    thread = threading.Thread(target=lambda: made.append(trials._mark(key, need, "NATIVE")))
    thread.start()
    thread.join()
    whats = [(need.kernel, dtype, "NATIVE") for dtype in ("bfloat16", "float32")]
    firsts = {trials._first_mark(kernel.kernels.speeds.measurement_file.file_of(key), what) for what in whats}
    assert len({*made}) == len(marks()) == len(firsts) == 2


def test_a_process_of_another_user_is_taken_to_run(kernel, measurements, need, monkeypatch):
    mark = kernel.kernels.speeds.trials._mark(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before", "overdue": True}))

    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert not failures(kernel, measurements) and marks()


def test_a_pipe_in_the_place_of_a_mark_is_not_waited_for(kernel, measurements, need):
    trials, key = kernel.kernels.speeds.trials, kernel.kernels.speeds.machine.key_of(CPU)
    mark = trials._mark(key, need, "NATIVE")
    mark.unlink()
    os.mkfifo(mark)
    assert trials._mark(key, need, "NATIVE") is None


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="containers number processes on Linux only")
def test_a_mark_of_another_container_is_left_to_it(kernel, measurements, need, monkeypatch):
    """On one machine, and with one name: there the number may be that of no process, or of another."""
    mark = kernel.kernels.speeds.trials._mark(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before", "overdue": True}))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "readlink", lambda path: "pid:[1]")
        assert not failures(kernel, measurements) and marks()
        # Unless it was written before this container began: then it is one of the container before it was restarted.
        os.utime(mark, (0, 0))
        assert "NATIVE" in failures(kernel, measurements)


@pytest.mark.parametrize(
    "change", [{"process": 10**30}, {"candidate": []}, {"kernel": {}}, {"overdue": None}, {"host": 1}], ids=str
)
def test_foreign_marks_are_no_errors(kernel, measurements, need, change):
    mark = kernel.kernels.speeds.trials._mark(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before", **change}))
    assert not failures(kernel, measurements)
    mark.write_text("[" * 100_000)
    assert not failures(kernel, measurements)


def test_no_process_is_asked_on_windows(kernel, measurements, need, monkeypatch):
    """There the question ends it."""
    mark = kernel.kernels.speeds.trials._mark(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before", "overdue": True}))
    with monkeypatch.context() as windows:
        windows.setattr("sys.platform", "win32")
        windows.setattr(os, "kill", lambda *_: pytest.fail("it was ended"))
        assert not failures(kernel, measurements) and marks()
    assert "NATIVE" in failures(kernel, measurements)


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_trial_that_ends_leaves_no_mark(kernel, measurements, need, error):
    key = kernel.kernels.speeds.machine.key_of(CPU)
    with pytest.raises(error) if error else contextlib.nullcontext():
        with kernel.kernels.speeds.trials.trial(key, need, "NATIVE"):
            assert len(marks()) == 1
            if error:
                raise error
    assert not marks()


def test_a_trial_that_ends_acquits_its_candidate(kernel, measurements, need):
    """Two processes that were ended years apart convict nobody if the kernel has run in between."""
    key = kernel.kernels.speeds.machine.key_of(CPU)
    for _ in range(2):
        mark = kernel.kernels.speeds.trials._mark(key, need, "NATIVE")
        mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before"}))
        assert not failures(kernel, measurements)
        with kernel.kernels.speeds.trials.trial(key, need, "NATIVE"):
            pass


def test_an_interrupt_before_a_candidate_begins_leaves_no_mark(kernel, measurements, need, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel.kernels.speeds.trials.threading.Timer, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with kernel.kernels.speeds.trials.trial(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE"):
            pass
    assert not marks()


def test_a_candidate_that_takes_long_is_named(kernel, measurements, need, monkeypatch):
    trials = kernel.kernels.speeds.trials
    told = []
    monkeypatch.setattr(trials, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(trials.warnings, "warn", lambda text, *_, **__: told.append(text))
    with trials.trial(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE"):
        time.sleep(0.2)
    assert len(told) == 1 and "NATIVE" in told[0] and "the next one leaves this candidate out" in told[0]


def test_a_mark_that_two_processes_see_counts_once(kernel, measurements, need, monkeypatch):
    """Processes that start together find the same mark; here another one judges it just before this one does."""
    trials, key = kernel.kernels.speeds.trials, kernel.kernels.speeds.machine.key_of(CPU)
    mark = trials._mark(key, need, "NATIVE")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before"}))
    has_ended, tables = trials._has_ended, []

    def judged_elsewhere(content, mark) -> bool:
        monkeypatch.setattr(trials, "_has_ended", has_ended)
        tables.append(trials.left_behind(key))
        return has_ended(content, mark)

    monkeypatch.setattr(trials, "_has_ended", judged_elsewhere)
    tables.append(trials.left_behind(key))
    assert [table.failed for table in tables] == [{}, {}] and not marks()


def test_no_link_in_the_folder_is_written_through(kernel, measurements, need, tmp_path):
    """A folder may be one that others write to, too: they know what the files are called."""
    trials, key = kernel.kernels.speeds.trials, kernel.kernels.speeds.machine.key_of(CPU)
    mark, theirs = trials._mark(key, need, "NATIVE"), tmp_path / "theirs"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before"}))
    file = kernel.kernels.speeds.measurement_file.file_of(key)
    trials._first_mark(file, (need.kernel, need.dtype, "NATIVE")).symlink_to(theirs)
    failures(kernel, measurements)
    assert not marks() and not theirs.exists()
    mark.symlink_to(theirs)
    with trials.trial(key, need, "NATIVE"):
        assert not theirs.exists()


def test_a_trial_that_ends_while_it_becomes_overdue_leaves_no_mark(kernel, measurements, need):
    trials = kernel.kernels.speeds.trials
    with trials.trial(kernel.kernels.speeds.machine.key_of(CPU), need, "NATIVE"):
        (mark,) = marks()
    with pytest.warns(RuntimeWarning, match="has been running"):
        trials._overdue(need, "NATIVE", mark)
    assert not marks()
