"""The benchmarks run, and their result files say what was measured, where and of which commit."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def bookkeeping(repository, variant, tmp_path_factory):
    """The results of the tiny sweep."""
    file = tmp_path_factory.mktemp("results") / "bookkeeping.json"
    sweep = repository / "benchmarks/sweep_bookkeeping.py"
    subprocess.run(
        [sys.executable, sweep, "--tiny", "--build", variant.parent, "--json", file], check=True, capture_output=True
    )
    return json.loads(file.read_text())


def test_bookkeeping_is_measured_in_both_directions(bookkeeping):
    assert {row["operation"] for row in bookkeeping["results"]} == {"momentum_pack_", "descend_"}
    for row in bookkeeping["results"]:
        assert row["seconds"] > 0 and row["foreach_seconds"] > 0 and row["copy_seconds"] > 0
        assert row["speed_up"] == pytest.approx(row["foreach_seconds"] / row["seconds"])


def test_results_name_the_machine_and_the_commit(bookkeeping, variant):
    built = json.loads((variant / "metadata.json").read_text())["provenance"]["kernel"]
    assert (bookkeeping["commit"], bookkeeping["dirty"]) == (built["commit"], built["dirty"])
    assert bookkeeping["device"] and bookkeeping["threads"] >= 1 and bookkeeping["torch"]


def test_committed_results_hold_what_the_readme_says(repository):
    """The bookkeeping's range in the README is that of its results file."""
    results = json.loads(next((repository / "benchmarks/results").glob("bookkeeping-cpu-*.json")).read_text())[
        "results"
    ]
    readme = (repository / "README.md").read_text()
    for operation in ("momentum_pack_", "descend_"):
        shares = [row["seconds"] / row["foreach_seconds"] for row in results if row["operation"] == operation]
        assert f"{min(shares):.2f} to {max(shares):.2f}" in readme
