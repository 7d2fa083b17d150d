"""Running files of laws in Triton's interpreter, which needs a process of its own, and telling what each law found."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree


def laws(file: Path) -> list[str]:
    """Return the names of a file's tests."""
    body = ast.parse(file.read_text()).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def verdicts(files: Sequence[Path], folder: Path) -> dict[str, list[str]]:
    """Return what was wrong with each law that ran, all in one process; RuntimeError if that ended without a report."""
    report = folder / "report.xml"
    # One thread: the products are small, and threads that wait for each other cost more than they do.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not report.exists():
        raise RuntimeError(f"the interpreter ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [f"{case.get('name')}: {problem.text}" for problem in case]
        found.setdefault(case.get("name").split("[")[0], []).extend(problems)
    return found
