"""A results file that is written row by row, so that finished measurements stay if a run ends early."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.machine import describe, device_name

RESULTS = Path(__file__).resolve().parent / "results"
UNMEASURED = "unmeasured"
# How the status of a row begins whose measurement raised; what it raised follows.
ERROR = "error: "
NOT_INSTALLED = "not installed"
# The part of a file with the contestants that have made the GPU unusable.
LOST = "lost_the_gpu"
NEEDS_GPU = "needs a GPU"


def facts(kernel: ModuleType, device: torch.device, settings: dict) -> dict:
    """Return everything that makes results comparable: machine, versions, commit, built files and `settings`."""
    variant = Path(kernel.__file__).parent
    built = sorted(file for file in variant.rglob("*") if file.suffix in (".py", ".so", ".json"))
    files = hashlib.sha256(b"".join(file.read_bytes() for file in built)).hexdigest()
    return {**describe(kernel, device), "files": files, **settings}


def default_path(topic: str, device: torch.device) -> Path:
    """Return `results/<topic>-<device>-<date>.json`; the device is `cpu` or the name of the GPU."""
    name = "cpu" if device.type == "cpu" else device_name(device)
    return RESULTS / f"{topic}-{slug(name)}-{datetime.date.today().isoformat()}.json"


def slug(name: str) -> str:
    """Return a device's name in the form that names of results files have."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def has_error(row: dict) -> bool:
    """Whether the measurement of a row raised."""
    return row["status"].startswith(ERROR)


def has_results(row: dict) -> bool:
    """Whether a row was measured, or says that a contestant cannot take part."""
    return row["status"] != UNMEASURED and not has_error(row)


class ResultFile:
    """Rows by key, each `unmeasured` until it is put. Every change is written to `path`, if there is one.

    Rows that `path` already has are kept, so a second run continues the first one. Raises ValueError if they were
    measured with another commit, on another machine or with other settings. `lost` has a mark for each contestant that
    has made the GPU unusable, in this run or an earlier one.
    """

    def __init__(self, path: Path | None, facts: dict, keys: list[str]):
        self._path, self._facts = path, facts
        self.lost: dict[str, str] = {}
        self.rows: dict[str, dict] = {key: {"case": key, "status": UNMEASURED} for key in keys}
        if path is not None and path.exists():
            self._take_over(json.loads(path.read_text()))
        self._write()

    def is_measured(self, key: str) -> bool:
        return has_results(self.rows[key])

    def put(self, key: str, row: dict) -> None:
        self.rows[key] = {"case": key, "status": "measured", **row}
        self._write()

    def lose(self, contestant: str, mark: str) -> None:
        """Note that a contestant has made the GPU unusable."""
        self.lost[contestant] = mark
        self._write()

    def _take_over(self, content: dict) -> None:
        self.lost = content.get(LOST, {})
        before = {key: value for key, value in content.items() if key not in ("results", LOST)}
        # Compare in JSON's form, in which tuples are lists.
        now = json.loads(json.dumps(self._facts))
        if before != now:
            differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
            raise ValueError(f"{self._path} holds other results, which differ in {', '.join(differing)}")
        self.rows.update({row["case"]: row for row in content["results"]})

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        lost = {LOST: self.lost} if self.lost else {}
        unfinished.write_text(json.dumps({**self._facts, **lost, "results": list(self.rows.values())}, indent=1) + "\n")
        os.replace(unfinished, self._path)
