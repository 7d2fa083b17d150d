"""A cache folder that cannot be written costs a process no time."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def test_an_old_lock_is_not_waited_for_where_nobody_can_remove_it(kernel, monkeypatch):
    file, key = kernel.kernels.measurement_file, kernel.kernels.machine.key_of(torch.device("cpu"))
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
