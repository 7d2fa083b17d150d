"""The lock on the file of measurements: whoever holds it and lives is waited for, and what the dead left is passed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

KERNEL, DTYPE = "cpu_products", "bfloat16"


@pytest.fixture
def key(kernel):
    return kernel.kernels.speeds.machine.key_of(torch.device("cpu"))


@pytest.fixture
def file(kernel, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "optimizer").mkdir()
    return kernel.kernels.speeds.measurement_file


@pytest.fixture
def lock(file, key):
    return file.file_of(key).with_suffix(".lock")


class Clock:
    """Stands in for `time` in the file's module: sleeping takes no time, and lets others act."""

    def __init__(self, meanwhile: Callable[[float], None]):
        self.begin = self.now = time.time()
        self.meanwhile = meanwhile

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile(self.now - self.begin)

    def touch(self, lock: Path) -> None:
        """Make a lock anew, now."""
        lock.unlink(missing_ok=True)
        lock.touch()
        os.utime(lock, (self.now, self.now))


def table(file, size: int):
    return file.Table({file.Need(KERNEL, DTYPE, size, size): {"m": size, "k": size, "products": "SINGLE"}}, {})


def sizes(file, key) -> list[int]:
    """The sizes of the entries. Nothing else is in the folder: no lock, and nothing half written."""
    (path,) = file.cache_folder().iterdir()
    return [entry["m"] for entry in json.loads(path.read_text())["measured"][KERNEL][DTYPE]]


def left_behind(lock: Path) -> None:
    """Leave a lock of an hour ago."""
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)


def test_a_lock_that_a_dead_process_left_is_passed_at_once(file, key, lock):
    left_behind(lock)
    began = time.monotonic()
    assert file.add(key, table(file, 8)) is None
    assert sizes(file, key) == [8] and time.monotonic() - began < file._LOCK_SECONDS


def test_a_process_that_dies_while_others_wait_is_passed_when_its_lock_is_old(file, key, lock, monkeypatch):
    clock = Clock(lambda seconds: None)
    clock.touch(lock)
    monkeypatch.setattr(file, "time", clock)
    assert file.add(key, table(file, 8)) is None
    assert sizes(file, key) == [8] and file._LOCK_SECONDS < clock.now - clock.begin < 2 * file._LOCK_SECONDS


def test_a_slow_writer_is_waited_for(file, key, monkeypatch):
    """It takes 50 times as long as the other one, and less than those that have died."""
    write, writing = file._replace, threading.Event()

    def slowly(path, text):
        if threading.current_thread() is not threading.main_thread():
            writing.set()
            time.sleep(0.5)
        write(path, text)

    monkeypatch.setattr(file, "_replace", slowly)
    slow = threading.Thread(target=file.add, args=(key, table(file, 8)))
    slow.start()
    writing.wait()
    assert file.add(key, table(file, 16)) is None
    slow.join()
    assert sizes(file, key) == [8, 16]


def test_many_live_writers_are_waited_for_however_long_that_takes_in_all(file, key, lock, monkeypatch):
    """The lock is handed on every three seconds, four times."""
    passed = []

    def others(seconds):
        if len(passed) < 4 and seconds > 3 * (len(passed) + 1):
            passed.append(seconds)
            clock.touch(lock)
            assert not file.file_of(key).exists()
        elif lock.exists() and seconds > 15:
            file._replace(file.file_of(key), json.dumps(file._content_of(key, table(file, 16))))
            lock.unlink()

    clock = Clock(others)
    clock.touch(lock)
    monkeypatch.setattr(file, "time", clock)
    assert file.add(key, table(file, 8)) is None
    assert len(passed) == 4 and sizes(file, key) == [8, 16]


def test_a_lock_that_stays_is_named(file, key, lock, monkeypatch):
    """As one that was made by a clock that is ahead."""
    clock = Clock(lambda seconds: clock.touch(lock))
    clock.touch(lock)
    monkeypatch.setattr(file, "time", clock)
    assert file.add(key, table(file, 8)) == f"others held {lock} for 60 seconds; if no process uses it, delete {lock}*"
    assert lock.exists() and not file.file_of(key).exists()


def test_nobody_waits_twice_for_a_lock_that_others_hold(measurements, file, key, monkeypatch):
    """A warm-up measures dozens of products, and other ranks wait for it."""
    waited = []
    monkeypatch.setattr(file, "add", lambda key, table: waited.append(1) or "others held the lock")
    with pytest.warns(RuntimeWarning, match="this process only: others held the lock"):
        for m in (8, 16, 24):
            measurements.keep(key, table(file, m))
    measurement = measurements.measured_here(key, file.Need(KERNEL, DTYPE, 24, 24))
    assert len(waited) == 1 and measurement.source == "measured here"


def test_the_new_lock_of_another_process_is_not_broken(file, key, lock, monkeypatch):
    """Both have found an old one. The other removes it and makes its own before this one acts."""
    left_behind(lock)
    others = SimpleNamespace(there=False)
    create = file._created

    def after_the_other(path):
        if path != lock and not others.there:
            others.there = True
            lock.unlink()
            lock.touch()
        return create(path)

    monkeypatch.setattr(file, "_created", after_the_other)
    monkeypatch.setattr(file, "_WAIT_SECONDS", 0.1)
    assert f"others held {lock}" in file.add(key, table(file, 8))
    assert others.there and [path.name for path in file.cache_folder().iterdir()] == [lock.name]


def test_who_was_stopped_for_too_long_leaves_the_lock_of_others(file, key, lock, monkeypatch):
    clock, write = Clock(lambda seconds: None), file._replace

    def stopped(path, text):
        clock.now += 60
        clock.touch(lock)
        write(path, text)

    monkeypatch.setattr(file, "_replace", stopped)
    assert file.add(key, table(file, 8)) is None and lock.exists()
    lock.unlink()
    assert sizes(file, key) == [8]


def test_of_many_that_find_an_old_lock_none_loses_anything(file, key, lock):
    """They break it at the same time."""
    left_behind(lock)
    together = threading.Barrier(8)

    def write(size):
        together.wait()
        problems.append(file.add(key, table(file, size)))

    problems: list = []
    writers = [threading.Thread(target=write, args=(size,)) for size in range(1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert problems == [None] * 8 and sizes(file, key) == list(range(1, 9))
