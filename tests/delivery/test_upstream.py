"""Each report in docs/upstream says what the installed clients do: its script prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.hub.client_environment import client_environment

DOCS = Path(__file__).resolve().parents[2] / "docs"
INDEX, REPORTS = DOCS / "upstream.md", sorted((DOCS / "upstream").glob("*.md"))
SCRIPT, PRINTED = re.compile(r"```python\n(.*?)```", re.DOTALL), re.compile(r"```text\n(.*?)```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)
def test_the_script_of_a_report_prints_what_it_says(report: Path, tmp_path: Path):
    text = report.read_text()
    (script,), (printed,) = SCRIPT.findall(text), PRINTED.findall(text)
    command, variables = [sys.executable, "-c", script], client_environment("http://127.0.0.1:9", tmp_path)
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == printed, f"was it mended upstream? Then {report.name} may go.\n{done.stderr}"


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)
def test_a_report_names_the_versions_that_are_installed(report: Path):
    title, _, clients, *_ = report.read_text().splitlines()
    named = dict(client.split(" ") for client in clients.split(" with "))
    assert title.startswith("# ") and named
    assert named == {name: version(name) for name in named}, "run its script with these versions, and say so in it"


def test_every_report_is_listed():
    listed = re.findall(r"\]\(upstream/([a-z-]+)\.md\)", INDEX.read_text())
    assert sorted(listed) == [report.stem for report in REPORTS]
