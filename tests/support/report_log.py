"""What a run of pytest with `--report-log` has found, read from the file while it runs or after it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Verdict(NamedTuple):
    """How a test ended, `passed`, `failed` or `skipped`, with its first words, and how long all of it took."""

    outcome: str
    said: str
    seconds: float


def read_log(file: Path) -> dict[str, Verdict]:
    """Return the verdict of each test that came to an end; a line that was cut off with the process is left out."""
    found: dict[str, Verdict] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if report.get("$report_type") == "TestReport" and (report["when"] == "call" or report["outcome"] != "passed"):
            earlier = found.get(report["nodeid"])
            if earlier is None or earlier.outcome == "passed":  # what fails in its setup or after it has failed
                found[report["nodeid"]] = Verdict(report["outcome"], first_words(report), report["duration"])
    return found


def first_words(report: dict) -> str:
    """Return why a test failed or was skipped, without its traceback."""
    problem = report["longrepr"]
    if isinstance(problem, dict):
        problem = problem["reprcrash"]["message"]
    return str(problem[-1] if isinstance(problem, list) else problem or "")
