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


def test_times_are_printed_even_if_the_results_file_is_of_another_commit(variant, tmp_path, monkeypatch, capsys):
    """Only after minutes of compiling is it known what the new results are of."""
    file = tmp_path / "build.json"
    file.write_text(json.dumps({"commit": "0000000", "results": []}))
    row = {"compiler_seconds": 123.0, "library_kib": 4567, "variant_kib": 8901, "gpu_code_kib": {}}
    monkeypatch.setattr(sweep_build, "measure", lambda *_: (variant, row))
    with pytest.raises(ValueError, match="holds other results, which differ in commit"):
        sweep_build.main(["--backends", "cpu", "--output", str(file)])
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("123", "4567", "8901"))
