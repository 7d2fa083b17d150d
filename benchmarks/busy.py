"""Processes that keep the cores busy, as other work on a shared machine does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

# It ends with its parent, however that ends.
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(10**5))"


@contextlib.contextmanager
def busy_cores() -> Iterator[list[int]]:
    """Run one busy process for each core that this process may use; yield their ids."""
    command = [sys.executable, "-c", SPIN, str(os.getpid())]
    processes = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def beside_busy(work: Callable, *arguments: object) -> Any:
    """Return what `work` returns, while other processes keep every core busy."""
    with busy_cores():
        return work(*arguments)
