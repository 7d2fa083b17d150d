"""Marks of trials: where they lie, who can read them, and what they tell on systems that say little."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tuning.test_trials import CPU, failures, marks

pytestmark = pytest.mark.filterwarnings("ignore:.*is left out from now on:RuntimeWarning")


@pytest.fixture
def trials(kernel, measurements):
    return kernel.kernels.speeds.trials


@pytest.fixture
def key(kernel):
    return kernel.kernels.speeds.machine.key_of(CPU)


@pytest.fixture
def need(kernel):
    return kernel.kernels.speeds.measurement_file.Need("cpu_products", "bfloat16", 24, 40)


@pytest.fixture
def failed(kernel, measurements):
    """The names of the candidates that are left out on this machine now."""
    return lambda: set(failures(kernel, measurements))


def overdue(mark: Path, **changes) -> Path:
    """Let a mark be of a process that had this one's number, and hung; other `changes` may make it another one's."""
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "since": "before", "overdue": True, **changes}))
    return mark


def test_all_candidates_that_hung_are_left_out(trials, key, need, failed):
    mark = overdue(trials._mark(key, need, "NATIVE"))
    overdue(shutil.copy(mark, mark.with_name(f"{mark.stem}-other.trial")), candidate="NATIVE_GRAM")
    assert failed() == {"NATIVE", "NATIVE_GRAM"}


def test_a_mark_counts_for_the_measurements_that_it_lies_beside(trials, key, need, failed):
    """Another number of threads has another file in the same folder."""
    other = key._replace(threads=77)
    overdue(trials._mark(other, need, "NATIVE"))
    assert not failed() and marks()
    what = need.kernel, need.dtype, "NATIVE"
    firsts = [trials._first_mark(trials.file_of(each), what) for each in (key, other)]
    assert firsts[0] != firsts[1] and {first.parent for first in firsts} == {marks()[0].parent}


def test_a_mark_is_named_by_its_process_and_can_be_read_by_everyone_who_can_read_new_files(trials, key, need):
    """Images are made by one user, and run by another."""
    before = os.umask(0o022)
    try:
        mark = trials._mark(key, need, "NATIVE")
    finally:
        os.umask(before)
    assert str(os.getpid()) in mark.name and mark.stat().st_mode & 0o777 == 0o644


def test_a_mark_makes_the_folders_that_it_needs(trials, key, need, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    with trials.trial(key, need, "NATIVE"):
        assert len(marks()) == 1


def test_a_folder_may_go_while_a_candidate_is_tried(trials, key, need):
    with trials.trial(key, need, "NATIVE"):
        shutil.rmtree(trials.file_of(key).parent)


@pytest.mark.parametrize("begins", [True, False])
def test_a_candidate_is_tried_where_its_mark_cannot_be_written(trials, key, need, monkeypatch, begins):
    """A full disk leaves an empty file, or none. Neither would say whose it is."""

    def full(mark, *_, **__):
        if begins:
            mark.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(trials, "_write", full)
    with trials.trial(key, need, "NATIVE"):
        assert not marks()
    assert not marks()


def test_a_candidate_is_tried_where_there_is_no_home(trials, key, need, monkeypatch):
    monkeypatch.setattr(trials, "file_of", lambda key: None)
    with trials.trial(key, need, "NATIVE"):
        assert not marks()
    assert not trials.left_behind(key).failed


def test_processes_are_known_by_their_number_where_a_system_says_no_more(
    trials, key, need, failed, monkeypatch, tmp_path
):
    """As macOS, which has no /proc."""

    def refused(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", refused)
    monkeypatch.setattr(trials, "Path", lambda path: tmp_path / path.lstrip("/"))
    mark = trials._mark(key, need, "NATIVE")
    overdue(mark, since="")
    assert not failed() and marks()
    with subprocess.Popen(["true"]) as process:
        pass
    overdue(mark, since="", process=process.pid)
    assert failed() == {"NATIVE"}
