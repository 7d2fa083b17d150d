"""Write tests/integrations/results.json, what docs/libraries.md is made of, from the log of a run of its tests.

python -m tools.pages.library_results LOG

LOG is what `pytest --report-log` wrote; the libraries are those that this Python imports, as the tests did.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.machine import cpu_name
from tests.support.report_log import read_log
from tools.pages.libraries import RESULTS, TESTS, distribution


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="the log of a whole run")
    log = parser.parse_args().log
    RESULTS.write_text(json.dumps(results(log, TESTS), indent=1) + "\n")
    print(f"written: {RESULTS}")


def results(log: Path, folder: Path) -> dict:
    """Return what a run found of the tests in `folder`, with which versions, where and when.

    Raises ValueError where the log has none of them.
    """
    prefix = "tests/integrations/"
    verdicts = {case.removeprefix(prefix): each for case, each in read_log(log).items() if case.startswith(prefix)}
    if not verdicts:
        raise ValueError(f"{log} has no test of {prefix}")
    tests = {case: {"outcome": each.outcome, "seconds": round(each.seconds, 2)} for case, each in verdicts.items()}
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": cpu_name(),
        "seconds": round(sum(each.seconds for each in verdicts.values())),
        "versions": {name: number for name, number in map(installed, sorted(folder.glob("test_*.py"))) if number},
        "tests": tests,
    }


def installed(file: Path) -> tuple[str, str | None]:
    """Return the package that a test file is about, and its version here."""
    name = distribution(file)
    try:
        return name, version(name)
    except PackageNotFoundError:
        return name, None


if __name__ == "__main__":
    main()
