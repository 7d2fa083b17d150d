"""Marks of candidates that are being tried. A candidate that hangs or kills its process leaves its mark behind.

A mark is a file beside the measurements' file, named by process and thread. When measurements are read next, marks of
dead processes are looked at: a candidate has failed if its mark says that it was overdue, or if this is its second
mark.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

from .machine import Key
from .measurement_file import Need, Table, empty, file_of

# After this time a warning names the candidate that is still running, so that the user knows what the process waits
# for.
PATIENCE_SECONDS = 60.0


@contextmanager
def trial(key: Key, need: Need, candidate: str) -> Iterator[None]:
    """Mark a candidate while it is tried. If the trial ends, an earlier trial that did not end is forgotten."""
    mark, waited = None, None
    try:  # from here on, because a user may interrupt at any place
        mark = _mark(key, need, candidate)
        waited = threading.Timer(PATIENCE_SECONDS, _overdue, (need, candidate, mark))
        waited.daemon = True
        waited.start()
        yield
        if mark is not None:
            with suppress(OSError):
                _first_mark(file_of(key), (need.kernel, need.dtype, candidate)).unlink()
    finally:
        if waited is not None:
            waited.cancel()
        if mark is not None:
            with suppress(OSError):
                mark.unlink()


def left_behind(key: Key) -> Table:
    """Return as failures the candidates that were overdue, or whose trials ended two processes of this machine.

    Their marks are deleted, each by the process that could rename it, so that one mark counts once. A process may also
    be killed from outside, once by chance, so the first mark of a candidate that was not overdue only counts as a first
    time.
    """
    table, file = empty(), file_of(key)
    for mark in _marks(file):
        try:
            content = json.loads(mark.read_text())
            what = [content[field] for field in ("kernel", "dtype", "candidate")]
            if not all(isinstance(word, str) for word in what) or not _has_ended(content, mark):
                continue
            mark = mark.rename(mark.with_suffix(f".{os.getpid()}-{threading.get_ident()}"))
            if content["overdue"] or _ended_before(file, what):
                why = f"the process that tried it did not come to its end; delete {file} to have it tried again"
                table.failed.setdefault((what[0], what[1]), {})[what[2]] = why
            mark.unlink()
        # Foreign, being written, or judged by another process, which has renamed it.
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return table


def _marks(file: Optional[Path]) -> list[Path]:
    """Return the marks beside a file; none if its folder cannot be read: `measurement_file.read` has warned."""
    try:
        marks = [] if file is None else list(file.parent.glob(f"{file.stem}.*.trial"))
    except OSError:
        return []
    return list(filter(_is_regular, marks))


def _is_regular(mark: Path) -> bool:
    """Whether a mark is a file: to open a pipe would wait for its other end. False for a link into a closed folder."""
    try:
        return mark.is_file()
    except OSError:
        return False


def _ended_before(file: Path, what: Sequence[str]) -> bool:
    """Whether this candidate has left a mark before, and no trial of it has ended since; else remember this mark."""
    try:
        _first_mark(file, what).touch(exist_ok=False)  # so it follows no link that another user has put there
    except FileExistsError:
        return True
    return False


def _first_mark(file: Path, what: Sequence[str]) -> Path:
    """Return the file that says that a candidate has left a mark."""
    return file.with_name(f"{file.stem}.{hashlib.sha256(' '.join(what).encode()).hexdigest()[:16]}.once")


def _mark(key: Key, need: Need, candidate: str) -> Optional[Path]:
    file = file_of(key)
    if file is None:
        return None
    mark = file.with_name(f"{file.stem}.{os.getpid()}-{threading.get_ident()}.trial")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        _write(mark, need, candidate, overdue=False)
    except OSError:  # `measurements.keep` warns about the same problem
        with suppress(OSError):
            mark.unlink()  # a full disk leaves an empty one
        return None
    return mark


def _write(mark: Path, need: Need, candidate: str, overdue: bool) -> None:
    content = {
        "host": platform.node(),
        "container": _container(),
        "process": os.getpid(),
        "since": _start_of(os.getpid()),
        "overdue": overdue,
    }
    # An overdue mark is not made anew: if there is none, its trial has just ended. Windows has no O_NOFOLLOW.
    flags = os.O_WRONLY | os.O_TRUNC | (0 if overdue else os.O_CREAT) | getattr(os, "O_NOFOLLOW", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # a pipe in its place is an error, and is not waited for
    with open(os.open(mark, flags, 0o666), "w") as written:
        written.write(json.dumps({**content, "kernel": need.kernel, "dtype": need.dtype, "candidate": candidate}))


def _overdue(need: Need, candidate: str, mark: Optional[Path]) -> None:
    if mark is not None:
        with suppress(OSError):
            _write(mark, need, candidate, overdue=True)
    warnings.warn(
        f"{need.kernel} {candidate} in {need.dtype} has been running for {PATIENCE_SECONDS:.0f} seconds. If it hangs, "
        "end this process: the next one leaves this candidate out",
        RuntimeWarning,
        stacklevel=1,
    )


def _has_ended(content: Mapping[str, Any], mark: Path) -> bool:
    """Whether the process that wrote a mark ran on this machine and has ended, even if its number is in use again.

    A mark from another container on a host of this name counts as one of this container before its restart, if it is
    older than that. Otherwise its process may be running.
    """
    if content["host"] != platform.node():
        return False
    if content["container"] != _container():
        return mark.stat().st_mtime < _start_of_this_container()
    if sys.platform == "win32":  # there `os.kill` would end the process, or the group of processes of a console
        return False
    try:
        os.kill(content["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    return content["since"] != _start_of(content["process"])


def _container() -> str:
    """Return the name of the namespace in which this process has its number; "" if the system does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of_this_container() -> float:
    """Return when its first process began, in seconds since the epoch."""
    booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    return booted + int(_start_of(1)) / os.sysconf("SC_CLK_TCK")


def _start_of(process: int) -> str:
    """Return when a process began, in the units of /proc; "" if the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
