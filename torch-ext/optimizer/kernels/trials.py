"""Marks of candidates that are being tried: one that hangs or ends its process leaves its mark, and is not tried again.

A mark is a file beside that of the measurements, named by the process. Whoever reads the measurements takes the marks
of processes that are gone for failures.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Optional

from .machine import Key
from .measurement_file import Need, Table, empty, file_of

# After which a candidate that has not come to its end is named, so that whoever waits knows for what.
PATIENCE_SECONDS = 60.0


@contextmanager
def trial(key: Key, need: Need, candidate: str) -> Iterator[None]:
    """Mark a candidate while it is tried."""
    mark = _mark(key, need, candidate)
    waited = threading.Timer(PATIENCE_SECONDS, _name, (need, candidate))
    waited.daemon = True
    waited.start()
    try:
        yield
    finally:
        waited.cancel()
        if mark is not None:
            mark.unlink(missing_ok=True)


def left_behind(key: Key) -> Table:
    """Return, as failures, the candidates during whose trial a process of this machine has ended; their marks go."""
    table, file = empty(), file_of(key)
    for mark in file.parent.glob(f"{file.stem}.*.trial") if file is not None else ():
        try:
            content = json.loads(mark.read_text())
            kernel, dtype, candidate = content["kernel"], content["dtype"], content["candidate"]
            gone = content["host"] == platform.node() and not _is_alive(content["process"])
        except (OSError, ValueError, KeyError, TypeError):  # being written
            continue
        if gone:
            why = "the process that tried it did not come to its end"
            table.failed.setdefault((kernel, dtype), {})[candidate] = why
            mark.unlink(missing_ok=True)
    return table


def _mark(key: Key, need: Need, candidate: str) -> Optional[Path]:
    file = file_of(key)
    if file is None:
        return None
    who = {"host": platform.node(), "process": os.getpid()}
    mark = file.with_name(f"{file.stem}.{os.getpid()}.trial")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({**who, "kernel": need.kernel, "dtype": need.dtype, "candidate": candidate}))
    except OSError:  # of which `measurements.keep` warns
        return None
    return mark


def _name(need: Need, candidate: str) -> None:
    warnings.warn(
        f"{need.kernel} {candidate} in {need.dtype} has not come to its end for {PATIENCE_SECONDS:.0f} seconds. If it "
        "hangs, end this process: the next one leaves this candidate out",
        RuntimeWarning,
        stacklevel=1,
    )


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
