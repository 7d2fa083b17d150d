"""The log of a run: a line of JSON for each step that was logged.

    {"step": 10, "seconds": 1.5, "loss": 2.25, "metrics": {"muon_update_rms": 0.002, "update_rms/mlp.up.weight": 0.002}}

`seconds` are those since the run began, and `metrics` are numbers by any names; both it and `loss` may be missing.
`examples/logging_callback.py` writes such a file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUMBERS = ("step", "seconds", "loss")
# What a file's name ends in if it names a seed: muon-seed3 or muon-3, but neither muon-lr0.02 nor muon-1e-3.
_SEED = re.compile(r"[-_.]seed[-_.]?\d+$|(?<!\de)[-_]\d+$")


@dataclass(frozen=True)
class Log:
    """The lines of one run, in the order of their steps; `name` is that of the file, without the number of a seed."""

    name: str
    lines: tuple[dict[str, Any], ...]

    def column(self, key: str) -> list[float]:
        """Return `step`, `seconds`, `loss` or a metric of every line, NaN where a line has none."""
        return [float(line.get(key, line.get("metrics", {}).get(key, math.nan))) for line in self.lines]

    def metrics(self) -> list[str]:
        """Return the names of all metrics, in the order in which they first come."""
        return list(dict.fromkeys(key for line in self.lines for key in line.get("metrics", {})))


def read_log(path: Path) -> Log:
    """Return a log; ValueError, with the line, for what is none."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no log: it is not text") from None
    lines = tuple(_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    if not lines:
        raise ValueError(f"{path} is no log: it has no line")
    steps = [line["step"] for line in lines]
    if steps != sorted(steps):
        raise ValueError(f"{path} is the log of more than one run: its steps go back")
    return Log(_SEED.sub("", path.stem), lines)


def _line(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of {path} is no JSON: {error}") from None
    metrics = line.get("metrics", {}) if isinstance(line, dict) else None
    if not isinstance(metrics, dict) or "step" not in line:
        raise ValueError(f'line {number} of {path} must be {{"step": ..., "metrics": {{...}}}}, got {text[:80]}')
    for key, value in {**{key: line[key] for key in NUMBERS if key in line}, **metrics}.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"{key} in line {number} of {path} must be a number, got {value!r}")
    return line


def by_name(logs: Sequence[Log]) -> dict[str, list[Log]]:
    """Return the logs of each name, which are runs of one kind with several seeds."""
    groups: dict[str, list[Log]] = {}
    for log in logs:
        groups.setdefault(log.name, []).append(log)
    return groups
