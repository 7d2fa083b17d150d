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
@pytest.mark.parametrize("backend", backends())
def test_the_row_of_a_build_has_its_times_and_sizes(backend, tmp_path):
    """A library is smaller than its variant, and compilers take time."""
    file = tmp_path / "build.json"
    sweep_build.main(["--backends", backend, "--output", str(file)])
    results = json.loads(file.read_text())
    (row,) = results["results"]
    assert row["case"] == backend and row["compiler_seconds"] > 1
    assert 0 < row["library_kib"] < row["variant_kib"] and all(kib > 0 for kib in row["gpu_code_kib"].values())
    asked = {"cpu": set(), "cuda": {"sm_75", "sm_80", "sm_90", "sm_90a", "sm_100"}}
    assert set(row["gpu_code_kib"]) == asked[backend]
    (table,) = sweep_tables(results)
    assert table.title == "Builds" and len(table.rows) == 1
