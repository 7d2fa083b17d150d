"""The sweep of builds: what it reports are the times and sizes of a variant that loads."""

from __future__ import annotations

import json

import pytest

from benchmarks import sweep_build
from tools.build.recipe import read_build
from tools.build.variants import unavailable_backends
from tools.pages.tables import sweep_tables


def backends() -> list[str]:
    missing = unavailable_backends(read_build(sweep_build.ROOT), None)
    return [backend for backend in sweep_build.BACKENDS if backend not in missing]


@pytest.mark.slow
def test_the_row_of_a_build_has_its_times_and_sizes(tmp_path):
    """A library is smaller than its variant, and compilers take time. The first variant is loaded here: the CPU's."""
    file, asked = tmp_path / "build.json", backends()
    sweep_build.main(["--backends", *asked, "--output", str(file)])
    results = json.loads(file.read_text())
    architectures = {"cpu": set(), "cuda": {"sm_75", "sm_80", "sm_90", "sm_90a", "sm_100"}}
    assert [row["case"] for row in results["results"]] == asked
    for row in results["results"]:
        assert row["compiler_seconds"] > 1 and 0 < row["library_kib"] < row["variant_kib"]
        assert set(row["gpu_code_kib"]) == architectures[row["case"]] and all(row["gpu_code_kib"].values())
    (table,) = sweep_tables(results)
    assert table.title == "Builds" and len(table.rows) == len(asked)
