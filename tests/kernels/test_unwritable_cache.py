"""A cache folder that cannot be written costs a process no time."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's rights, with which every folder can be written."""
    root = os.geteuid() == 0
    if root:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


def test_a_folder_that_cannot_be_searched_is_a_warning(kernel, monkeypatch):
    """As the home of root is in many containers whose processes run as nobody."""
    measurements, key = kernel.kernels.speeds.measurements, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        Path(base).chmod(0o000)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{base}/cache")
        measurements.forget()
        with as_nobody(), pytest.warns(RuntimeWarning, match="is ignored, as it cannot be read"):
            failed = dict(measurements.all_failed(key))
        Path(base).chmod(0o755)
    monkeypatch.undo()
    measurements.forget()
    assert not failed


@pytest.mark.parametrize("when, left", [("before", []), ("after", [".json"])])
def test_an_interrupt_when_the_file_is_renamed_is_not_swallowed(kernel, monkeypatch, tmp_path, when, left):
    """Nor does it leave a file that is half written."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    replace = os.replace

    def interrupted(*names):
        if when == "after":
            replace(*names)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.add(key, file.empty())
    assert [path.suffix for path in (tmp_path / "optimizer").iterdir()] == left


def test_a_full_disk_keeps_no_empty_marks(kernel, monkeypatch, tmp_path):
    trials, key = kernel.kernels.speeds.trials, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def half_written(mark, *what, **more):
        mark.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trials, "_write", half_written)
    with trials.trial(key, kernel.kernels.speeds.measurement_file.Need("cpu_products", "bfloat16", 24, 40), "NATIVE"):
        assert not list((tmp_path / "optimizer").iterdir())


def test_an_old_lock_is_not_waited_for_where_nobody_can_remove_it(kernel, monkeypatch):
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    # Not in a folder of the test's own: others than root may not look into it.
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        Path(base).chmod(0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        lock = file.file_of(key).with_suffix(".lock")
        lock.parent.mkdir()
        lock.touch()
        lock.parent.chmod(0o555)
        began = time.monotonic()
        with as_nobody():
            problem = file.add(key, file.empty())
        seconds = time.monotonic() - began
        lock.parent.chmod(0o755)
    assert problem == f"{lock.parent} cannot be written" and seconds < 1


def test_another_user_reads_what_was_kept(kernel, monkeypatch, tmp_path):
    """An image is made as root, and runs as somebody else."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0o022)
    file.add(key, file.empty())
    os.umask(before)
    assert file.file_of(key).stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_read_now_is_not_replaced(kernel, monkeypatch, tmp_path):
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file.add(key, file.Table({}, {("cpu_products", "float32"): {"NATIVE": "wrong"}}))
    before = file.file_of(key).read_bytes()

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", stale)
        assert "Stale" in file.add(key, file.empty())
    assert file.file_of(key).read_bytes() == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_not_opened(kernel, measurements, make):
    """To open a pipe would wait, and a device may never end."""
    file, key = kernel.kernels.speeds.measurement_file, kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    file.cache_folder().mkdir()
    make(file.file_of(key))
    make(file.file_of(key).with_suffix(".1-1.trial"))
    with pytest.warns(RuntimeWarning, match="is ignored, as it cannot be read: .* is no regular file"):
        assert not measurements.all_failed(key)
    with pytest.warns(RuntimeWarning, match="in this process only: .* is no regular file"):
        measurements.keep(key, file.empty())


def test_a_process_without_a_home_folder_remembers_what_it_measures(kernel, measurements, monkeypatch):
    """As that of a user without an entry in a container's list of users."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    measurements.forget()
    with pytest.warns(RuntimeWarning, match="in this process only: there is no home folder"):
        kernel.tune([(24, 40)], dtype=torch.bfloat16, device="cpu", budget=0.1, progress=lambda *_: None)
    chosen = kernel.kernels.products.select_products(torch.device("cpu"), torch.bfloat16, 24, 40)
    assert chosen.source == "measured here"
