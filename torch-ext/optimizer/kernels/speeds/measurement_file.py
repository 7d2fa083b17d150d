"""The file in the user's cache folder with what was measured and proven on this machine. Each key has a file.

    {"key": {...}, "measured": {kernel: {dtype: [entry, ...]}}, "failed": {kernel: {dtype: {candidate: why}}}}

An entry is of one size, `m` and `k`, and has what `measurements.py` says. `untried` names the candidates for which
there was no time. Several processes may write at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Union

from ..user_warnings import warn_user
from .machine import Key

# The fields of an entry besides its size: integers that a kernel is launched with, and the result of measuring it.
LAUNCHED = {
    "symmetric_gemm": ("tile", "tile_k", "group", "warps", "stages", "sections"),
    "small_polar": ("side", "width", "depth", "warps", "stages", "on_chip"),
    "cpu_products": (),
}
JUDGED = {"symmetric_gemm": ("gain", float), "small_polar": ("gain", float), "cpu_products": ("products", str)}

# Writing holds the lock for milliseconds. A lock older than this belongs to a process that has died.
_LOCK_SECONDS = 5.0
# Who has waited for this long gives up: a lock stays new if it is from a machine whose clock is ahead.
_WAIT_SECONDS = 12 * _LOCK_SECONDS


class Need(NamedTuple):
    """One thing to measure: a kernel, or a choice among several, in one dtype and for one size."""

    kernel: str
    dtype: str  # without `torch.`
    m: int
    k: int

    @property
    def size(self) -> tuple[int, int]:
        """Its m and k."""
        return self.m, self.k


class Table(NamedTuple):
    """Measured entries, and the candidates that have failed: (kernel, dtype) -> candidate -> reason."""

    measured: dict[Need, dict[str, Any]]
    failed: dict[tuple[str, str], dict[str, str]]

    def take(self, other: Table) -> None:
        """Add everything in `other`, replacing entries for the same size."""
        self.measured.update(other.measured)
        for key, candidates in other.failed.items():
            self.failed.setdefault(key, {}).update(candidates)


def empty() -> Table:
    """Return a table without entries."""
    return Table({}, {})


def cache_folder() -> Optional[Path]:
    """Return the user's cache folder by the XDG convention (a relative path is ignored); None without a home folder."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "optimizer"


def file_of(key: Key) -> Optional[Path]:
    """Return the path of the file for a key; None where there is no cache folder."""
    folder = cache_folder()
    name = re.sub(r"[^A-Za-z0-9]+", "_", key.device).strip("_")
    digest = hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:12]
    return None if folder is None else folder / f"{name}-{digest}.json"


def read(key: Key) -> Table:
    """Return the table stored for a key. A broken file, or one for another key, gives an empty table and a warning."""
    file = file_of(key)
    try:
        return empty() if file is None else _read(file, key)
    except OSError as error:
        warn_user(f"{file} is ignored, as it cannot be read: {error}", RuntimeWarning)
    except ValueError as error:
        warn_user(f"{file} is ignored, as it holds no measurements for {key}: {error}", RuntimeWarning)
    return empty()


def _read(file: Path, key: Key) -> Table:
    """Do what `read` does, but raise OSError for a file that cannot be read, and ValueError for one that is broken."""
    try:
        if file.exists() and not file.is_file():  # to open a pipe would wait for who writes to it
            raise OSError(f"{file} is no regular file")
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return empty()
    try:
        content = json.loads(text)
        if content["key"] != key._asdict():
            raise ValueError(f"it is for {content['key']}")
        return _table_of(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def add(key: Key, table: Table) -> Optional[str]:
    """Merge `table` into the file of a key. Return None, or the reason why it could not be written.

    A new file is written beside the old one and renamed, so a reader sees all of one version or all of the other.
    """
    file = file_of(key)
    if file is None:
        return "there is no home folder"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file.parent, os.W_OK):  # checked first: with an old lock in it, `_alone` would wait
            return f"{file.parent} cannot be written"
        with _alone(file.with_suffix(".lock")):
            try:
                kept = _read(file, key)  # an OSError ends this: what cannot be read now may hold good measurements
            except ValueError:  # the user was warned when it was read first
                kept = empty()
            kept.take(table)
            _replace(file, json.dumps(_content_of(key, kept), indent=1) + "\n")
    except OSError as error:
        return str(error)
    return None


def _table_of(content: dict[str, Any]) -> Table:
    table = empty()
    kernels = content["measured"].items()
    listed = [(k, d, entry) for k, dtypes in kernels for d, entries in dtypes.items() for entry in entries]
    for kernel, dtype, entry in listed:
        _check_entry(kernel, entry)
        table.measured[Need(kernel, dtype, entry["m"], entry["k"])] = entry
    for kernel, dtypes in content["failed"].items():
        for dtype, candidates in dtypes.items():
            table.failed[kernel, dtype] = {str(name): str(why) for name, why in candidates.items()}
    return table


def _check_entry(kernel: str, entry: dict[str, Any]) -> None:
    """Raise an error unless an entry of a file is a measurement of a kernel."""
    field, kind = JUDGED[kernel]
    numbers = {name: entry[name] for name in ("m", "k", *LAUNCHED[kernel])}
    integers = all(type(number) is int for number in numbers.values())
    switch, judged = numbers.pop("on_chip", 0), entry[field]
    possible = type(judged) is kind and (kind is str or 0 <= judged < math.inf)
    if not integers or min(numbers.values()) < 1 or switch not in (0, 1) or not possible:
        raise ValueError(f"{entry} is not a measurement of {kernel}")
    untried = entry.get("untried", [])
    if not isinstance(untried, list) or not all(isinstance(name, str) for name in untried):
        raise ValueError(f"{entry} does not say by name what was not tried")


def _content_of(key: Key, table: Table) -> dict[str, Any]:
    measured: dict[str, dict[str, list]] = {}
    failed: dict[str, dict[str, dict]] = {}
    for need, entry in sorted(table.measured.items()):
        measured.setdefault(need.kernel, {}).setdefault(need.dtype, []).append(entry)
    for (kernel, dtype), candidates in sorted(table.failed.items()):
        failed.setdefault(kernel, {})[dtype] = candidates
    return {"key": key._asdict(), "measured": measured, "failed": failed}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock, once no other process does. Raises OSError after `_WAIT_SECONDS`."""
    end = time.monotonic() + _WAIT_SECONDS
    identity = _created(lock)
    while identity is None:
        if time.monotonic() > end:
            raise OSError(f"others held {lock} for {_WAIT_SECONDS:g} seconds; if no process uses it, delete {lock}*")
        if _is_left_behind(lock):
            _break(lock)
        else:
            time.sleep(0.01)
        identity = _created(lock)
    try:
        yield
    finally:
        if _identity(lock) == identity:  # another process breaks it if this one is stopped for too long
            lock.unlink(missing_ok=True)


def _break(lock: Path) -> None:
    """Remove a lock that is left behind, and not the new one of a process that has removed that in the meantime."""
    alone = lock.with_name(f"{lock.name}-breaking")  # only who has made this file removes a lock of others
    if _created(alone) is None:
        time.sleep(0.01)
        return
    try:
        if _is_left_behind(lock):
            lock.unlink(missing_ok=True)
    finally:
        alone.unlink(missing_ok=True)


def _is_left_behind(lock: Path) -> bool:
    identity = _identity(lock)
    return identity is not None and time.time() - identity[1] / 1e9 > _LOCK_SECONDS


def _created(path: Path) -> Optional[tuple[int, int]]:
    """Create an empty file and return its identity; None if it is there already."""
    try:
        opened = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return None
    try:
        return _identity(opened)
    finally:
        os.close(opened)


def _identity(file: Union[Path, int]) -> Optional[tuple[int, int]]:
    """Return the inode of a file and when it was written, in ns; None without one. An inode alone is used again."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _replace(file: Path, text: str) -> None:
    # Not by `tempfile`, whose files nobody else can read: images are made by one user, and run by another.
    new = file.with_name(f"{file.stem}-{secrets.token_hex(4)}.tmp")
    written = open(new, "x")  # before the handler, which removes the file: this one is ours
    try:
        with written:
            written.write(text)
        os.replace(new, file)
    except BaseException:
        new.unlink(missing_ok=True)  # an interrupt may come after the renaming
        raise
