"""Known measurements of a size on a device: made here or shipped. Also, which candidates have failed here.

Shipped measurements are `configs/<device>.json`, written by the lab: for each kernel and dtype a list of entries

    {"m": 2048, "k": 8192, "tile": 128, "tile_k": 64, "group": 8, "warps": 8, "stages": 4, "sections": 1, "gain": 1.31}

`gain` is torch's time divided by the kernel's. A size uses the entry nearest in m and k, by ratio. A measurement made
here counts for exactly its own size.

Ranks that share matrices must make the same choice, or their copies would drift apart. So with several ranks a
measurement counts only after ranks have agreed on it, and only for the matrices that exactly these ranks share. A
failure seen here always counts.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from ..user_warnings import warn_user
from . import measurement_file
from .machine import Key, multiprocessors
from .measurement_file import Need, Table
from .trials import left_behind

_CONFIGS = Path(__file__).parent / "configs"

# A GPU with another name has the same waves if its number of multiprocessors is within this factor. A guess until it is
# measured.
_ALIKE = 1.1

Ranks = tuple[int, ...]


class Known(NamedTuple):
    """An entry, and where it comes from in the words of `explain()`."""

    entry: Mapping[str, Any]
    source: str


class Agreed(NamedTuple):
    """An entry that ranks have agreed to use, the rank that measured it, and the sets of ranks that agreed."""

    entry: Mapping[str, Any]
    rank: int
    sets: frozenset[Ranks]


class _State:
    """What this process knows about measurements."""

    def __init__(self) -> None:
        self.tables: dict[Key, Table] = {}
        self.agreed: dict[Key, dict[Need, Agreed]] = {}
        self.several_ranks = False
        self.changes = 0
        self.kept_here_only = False  # because the file could not be written, or others held its lock


_STATE = _State()


def changed() -> int:
    """Return a counter that increases whenever choices may have changed. Keep the number and compare it later."""
    return _STATE.changes


def measured_here(key: Optional[Key], need: Need, among: Optional[Ranks] = None) -> Optional[Known]:
    """Return what was measured for a size: by this machine or, with several ranks, the entry that they agreed on.

    `among`: the ranks that share the matrices. () stands for matrices of which unknown other ranks may have copies, and
    None for a caller that shares no matrices.
    """
    if key is None:
        return None
    if among is not None or _STATE.several_ranks:
        agreed = agreement(key, need)
        if agreed is None or (among is not None and among not in agreed.sets):
            return None
        return Known(agreed.entry, f"measured by rank {agreed.rank}")
    entry = own_measurement(key, need)
    return None if entry is None else Known(entry, "measured here")


def sizes_here(key: Optional[Key], kernel: str, dtype: str, among: Optional[Ranks] = None) -> list[Known]:
    """Return what `measured_here` returns for each size of a kernel and dtype that has a measurement."""
    if key is None:
        return []
    agreed = _STATE.agreed.get(_of_any_threads(key), {})
    known = agreed if among is not None or _STATE.several_ranks else _table(key).measured
    entries = (measured_here(key, need, among) for need in list(known) if (need.kernel, need.dtype) == (kernel, dtype))
    return [entry for entry in entries if entry is not None]


def failed(key: Optional[Key], kernel: str, dtype: str) -> Mapping[str, str]:
    """Return the candidates of a kernel that have failed here: `candidate_name` -> reason."""
    return all_failed(key).get((kernel, dtype), {})


def all_failed(key: Optional[Key]) -> Mapping[tuple[str, str], Mapping[str, str]]:
    """Return the failed candidates of all kernels: (kernel, dtype) -> candidate -> reason."""
    return {} if key is None else _table(key).failed


def candidate_name(entry: Mapping[str, Any], kernel: str) -> str:
    """Return the name of an entry's candidate, which is unique among the candidates of its kernel."""
    if "products" in entry:
        return entry["products"]
    return "-".join(str(entry[field]) for field in measurement_file.LAUNCHED[kernel])


def keep(key: Key, table: Table) -> None:
    """Record what was measured here, also in the user's cache folder; after a first failure, a warning, only here."""
    _table(key).take(table)
    _STATE.changes += 1
    # To wait for a lock takes up to a minute. A warm-up would do it for each product, while other ranks wait.
    problem = None if _STATE.kept_here_only else measurement_file.add(key, table)
    if problem:
        _STATE.kept_here_only = True
        warn_user(f"measurements are kept in this process only: {problem}", RuntimeWarning)


def record_failures(key: Key, wrong: Mapping[tuple[str, str], Mapping[str, str]]) -> None:
    """Record here what has failed on another rank. Ranks need this because they must exclude the same candidates."""
    news = {of: c for of, c in wrong.items() if not c.keys() <= _table(key).failed.get(of, {}).keys()}
    if news:
        keep(key, Table({}, {of: dict(candidates) for of, candidates in news.items()}))


def own_measurement(key: Key, need: Need) -> Optional[Mapping[str, Any]]:
    """Return what this machine measured, agreed among ranks or not; None if the chosen candidate has failed since."""
    entry = _table(key).measured.get(need)
    return None if entry is not None and has_failed(key, need, entry) else entry


def has_failed(key: Key, need: Need, entry: Mapping[str, Any]) -> bool:
    """Whether the candidate that an entry chooses has failed since."""
    return entry.get("gain", 1.0) >= 1 and candidate_name(entry, need.kernel) in failed(key, need.kernel, need.dtype)


def agreement(key: Key, need: Need) -> Optional[Agreed]:
    """Return the entry that ranks have agreed on for a size; None if there is none, or if it has failed since.

    It holds for any number of threads: else a rank that changes its own would no longer choose what the others do.
    """
    agreed = _STATE.agreed.get(_of_any_threads(key), {}).get(need)
    return None if agreed is None or has_failed(key, need, agreed.entry) else agreed


def _of_any_threads(key: Key) -> Key:
    return key._replace(threads=0)


def agree(key: Key, need: Need, entry: Mapping[str, Any], rank: int, ranks: Ranks) -> None:
    """Record that `ranks` take an entry. If others have agreed on one for this size before, it must be the same."""
    before = agreement(key, need)
    sets = (before.sets if before else frozenset()) | {ranks}
    if before is None or ranks not in before.sets:
        _STATE.agreed.setdefault(_of_any_threads(key), {})[need] = Agreed(entry, rank, sets)
        _STATE.changes += 1


def work_among_ranks(several: bool) -> None:
    """Say whether this process works with other ranks. If it does, measurements that they may lack do not count."""
    if several != _STATE.several_ranks:
        _STATE.several_ranks = several
        _STATE.changes += 1


def forget() -> None:
    """Forget everything that this process has read, measured and agreed on. Files stay."""
    changes = _STATE.changes
    _STATE.__init__()
    _STATE.changes = changes + 1


@functools.cache
def shipped(device_name: str) -> tuple[str, dict]:
    """Return the shipped measurements for a device: (device they were made on, kernel -> dtype name -> entries).

    If none have this device's name, they come from a device with the same compute capability and about as many
    multiprocessors, the nearest in that number. Without such a device the result is ("", {}).
    """
    file = _CONFIGS / f"{device_name.replace(' ', '_')}.json"
    if file.exists():
        return device_name, json.loads(file.read_text())
    facts, ratio, nearest = multiprocessors(device_name), _ALIKE, ("", {})
    for file in sorted(_CONFIGS.glob("*.json")) if facts else ():
        content = json.loads(file.read_text())
        count = content.get("multiprocessors")
        if count and content.get("capability") == facts[0] and _ratio(count, facts[1]) <= ratio:
            ratio, nearest = _ratio(count, facts[1]), (content["device"], content)
    return nearest


def shipped_entries(key: Optional[Key], kernel: str, dtype: str) -> list[dict]:
    """Return the shipped entries of a kernel and dtype for a device, except candidates that have failed here."""
    if key is None:
        return []
    entries, wrong = shipped(key.device)[1].get(kernel, {}).get(dtype, []), failed(key, kernel, dtype)
    return [entry for entry in entries if candidate_name(entry, kernel) not in wrong] if wrong else entries


def nearest_shipped(key: Optional[Key], kernel: str, dtype: str, size: tuple[int, int]) -> Optional[dict]:
    """Return the shipped entry of a kernel and dtype whose size is nearest to `size`, (m, k); None without entries."""
    return nearest_of([(entry["m"], entry["k"], entry) for entry in shipped_entries(key, kernel, dtype)], *size)


Sized = Sequence[tuple[int, int, Any]]  # values with the sizes m and k that they are of


def exact_or_nearest(here: Sized, shipped: Sized, m: int, k: int) -> Any:
    """Return the value measured here for exactly m x k, else the nearest shipped one; None without either."""
    for measured_m, measured_k, value in here:  # a loop, as below
        if (measured_m, measured_k) == (m, k):
            return value
    return nearest_of(shipped, m, k)


def nearest_of(entries: Sized, m: int, k: int) -> Any:
    """Return the value whose size is nearest to m x k: by ratio, over both sides together. None without entries."""
    nearest, smallest = None, math.inf
    for measured_m, measured_k, value in entries:  # torch.compile traces this with symbolic sizes, but not min()
        factor = _ratio(measured_m, max(m, 1)) * _ratio(measured_k, max(k, 1))
        if factor < smallest:
            nearest, smallest = value, factor
    return nearest


def _ratio(a: int, b: int) -> float:
    return max(a / b, b / a)


def _table(key: Key) -> Table:
    """Return the table of a key; its file is read at the first call."""
    if key not in _STATE.tables:
        _STATE.tables[key] = measurement_file.read(key)
        hung = left_behind(key)
        if hung.failed:
            keep(key, hung)
            _warn_of(hung)
    return _STATE.tables[key]


def _warn_of(hung: Table) -> None:
    for (kernel, dtype), whys in hung.failed.items():
        for candidate, why in whys.items():
            warn_user(f"{kernel} {candidate} in {dtype} is left out from now on: {why}", RuntimeWarning)
