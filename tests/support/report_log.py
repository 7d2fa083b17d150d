"""What a run of pytest with `--report-log` has found, read from the file while it runs or after it ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Verdict(NamedTuple):
    """How a test ended, `passed`, `failed` or `skipped`, with its first words, and how long all of it took."""

    outcome: str
    message: str
    seconds: float


def read_log(file: Path) -> dict[str, Verdict]:
    """Return the verdict of each test that came to an end; a line that was cut off with the process is left out."""
    verdicts: dict[str, Verdict] = {}
    for report in _reports(file, "TestReport"):
        if report["when"] == "call" or report["outcome"] != "passed":
            earlier = verdicts.get(report["nodeid"])
            if earlier is None or earlier.outcome == "passed":  # what fails in its setup or after it has failed
                verdicts[report["nodeid"]] = Verdict(report["outcome"], first_words(report), report["duration"])
    return verdicts


def uncollected(file: Path) -> dict[str, str]:
    """Return why tests could not be collected, by the names of their files: the last line of what was said."""
    failed = (report for report in _reports(file, "CollectReport") if report["outcome"] == "failed")
    return {report["nodeid"]: first_words(report).splitlines()[-1].removeprefix("E").strip() for report in failed}


def _reports(file: Path, kind: str) -> Iterator[dict]:
    """Yield the reports of a kind in a log."""
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            report = json.loads(line)
            if report.get("$report_type") == kind:
                yield report


def first_words(report: dict) -> str:
    """Return why a test failed or was skipped, without its traceback."""
    problem = report["longrepr"]
    if isinstance(problem, dict):
        problem = problem["reprcrash"]["message"]
    return str(problem[-1] if isinstance(problem, list) else problem or "")
