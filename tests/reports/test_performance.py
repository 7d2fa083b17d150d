"""docs/performance.md is what the tool makes of the results, and a report shows what was found."""

from __future__ import annotations

import json
import re

from tools.pages import performance
from tools.pages.lab_tables import lab_tables
from tools.pages.tables import Table, sweep_tables


def record(stage: str, key: str, status: str = "ok", problem: str = "", value: object = None) -> dict:
    return {"stage": stage, "key": key, "status": status, "seconds": 1.0, "problem": problem, "value": value}


def lab_report() -> dict:
    entry = {"m": 64, "k": 64, "tile": 32, "tile_k": 64, "group": 8, "warps": 4, "stages": 3, "gain": 1.5, "count": 2}
    entry |= {"seconds": 2e-6, "spread": 0.01, "other_seconds": 3e-6, "candidates": 9}
    entry |= {"predicted_seconds": 2.5e-6, "predicted_other_seconds": 4e-6}
    stages = {
        "environment": [record("environment", "dense float16", value={"tera_flops": 700.0})],
        "prove": [
            record("prove", "NaN float16", "failed", "elsewhere"),
            record("prove", "graphs", "skipped", "no GPU"),
            record("prove", "another", "cut"),
        ],
        "tune": [record("tune", "symmetric_gemm float16 64x64", value=entry)],
        "measure": [record("measure", "new", value={"results": [{"size": 3, "milliseconds": 0.25}]})],
    }
    return {"lab": {"device": "Some GPU", "torch": "2.13.0", "commit": "c" * 40}, "date": "today", "stages": stages}


def test_page_is_what_the_tool_makes_of_the_results():
    assert performance.PAGE.read_text() == performance.page(performance.RESULTS, performance.PAGE.parent), (
        "run `make report`"
    )


def test_section_names_its_device_and_commit(tmp_path):
    (tmp_path / "some-gpu.json").write_text(json.dumps(lab_report()))
    (tmp_path / "some-gpu-ideal.png").touch()
    page = performance.page(tmp_path, tmp_path.parent)
    assert "Some GPU, torch 2.13.0; commit `cccccccccccc`." in page
    assert f"]({tmp_path.name}/some-gpu.json)" in page and f"]({tmp_path.name}/some-gpu-ideal.png)" in page
    config = "tile 32 tile_k 64 group 8 warps 4 stages 3"
    assert f"| symmetric_gemm | float16 | 2 x 64 x 64 | {config} | 2.0 ±1% | 2.5 | 3.0 | 4.0 | 1.50 | 9 |" in page


def test_rows_and_columns_without_content_are_named_below_the_table():
    rows = [("a", "1", "", "needs a GPU"), ("b", "2", "", "needs a GPU"), ("c", "", "unmeasured", "")]
    shown, missing = performance.without_nothing(Table("title", ("case", "ms", "of ideal", "peer / ours"), rows))
    assert shown.headings == ("case", "ms") and shown.rows == [("a", "1"), ("b", "2")]
    assert missing == ["c", "of ideal", "peer / ours (needs a GPU)"]
    empty = Table("title", ("case", "ms"), [("a", "unmeasured")])
    assert performance.without_nothing(empty) == (empty, [])


def test_files_are_sorted_by_question_and_the_newest_first(tmp_path):
    names = "step-cpu-2026-11-21", "training-step-cpu-2026-11-20", "step-cpu-2026-11-24", "some-gpu"
    for name in names:
        rows = [{"case": "a", "methods": ["standard gemm_ (avx2) float32"]}, {"case": "b", "status": "unmeasured"}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": "AMD EPYC", "results": rows}))
    page = performance.page(tmp_path, tmp_path.parent)
    assert [line.split(" | ")[1] for line in page.splitlines() if re.match(r"\| .*\? \|", line)] == [
        "[step-cpu-2026-11-24](#step-cpu-2026-11-24), AMD EPYC with avx2; "
        "[step-cpu-2026-11-21](#step-cpu-2026-11-21), AMD EPYC with avx2 |",
        "[training-step-cpu-2026-11-20](#training-step-cpu-2026-11-20), AMD EPYC with avx2 |",
        "[some-gpu](#some-gpu), AMD EPYC with avx2 |",
    ]
    assert [line for line in page.splitlines() if line.startswith(("## ", "### "))] == [
        "## How long does a step take, beside other Muons?",
        "### step-cpu-2026-11-24",
        "### step-cpu-2026-11-21",
        "## How much of a whole training step is the optimizer's?",
        "### training-step-cpu-2026-11-20",
        "## What was measured on one GPU?",
        "### some-gpu",
    ]


def test_failures_are_shown_with_their_reason():
    tables = {table.title: table for table in lab_tables(lab_report())}
    assert ("prove", "0", "1", "1", "1") in tables["How many items of the lab succeeded"].rows
    assert ("prove", "NaN float16", "failed", "elsewhere") in tables["What failed, was skipped or cut"].rows
    assert tables["new"].headings == ("size", "milliseconds") and tables["new"].rows == [("3", "0.25")]


def test_peers_are_shown_by_time_ratio_or_reason():
    measured = {"milliseconds": 1.0, "ideal_milliseconds": 0.5}
    contestants = {"ours": {"error": 1e-3}, "torch": {"ratio": [1.8, 2.0, 2.2]}, "timm": "not installed"}
    rows = [{"case": "1x8x8", **measured, "contestants": contestants}, {"case": "1x9x9", "status": "unmeasured"}]
    (table,) = sweep_tables({"results": rows})
    assert table.headings == ("case", "ms", "ideal ms", "of ideal", "error", "torch / ours", "timm / ours")
    assert table.rows[0][-2:] == ("2.00 (1.80-2.20)", "not installed")
    assert table.rows[1] == ("1x9x9", "unmeasured", "", "", "", "", "")


def test_a_peer_that_was_not_asked_for_has_no_column():
    measured = {"milliseconds": 1.0, "ideal_milliseconds": 0.5}
    outcomes = {"never": ("unmeasured", "unmeasured"), "once": ("unmeasured", {"ratio": [1.8, 2.0, 2.2]})}
    cases = [{name: each[i] for name, each in outcomes.items()} for i in range(2)]
    rows = [{"case": "1x8x8", **measured, "contestants": {"ours": {"error": 1e-3}, **case}} for case in cases]
    (table,) = sweep_tables({"results": rows})
    assert table.headings[5:] == ("once / ours",)
    assert [row[5:] for row in table.rows] == [("unmeasured",), ("2.00 (1.80-2.20)",)]


def test_step_row_shows_host_time_memory_and_launches():
    ours = {"error": 1e-3, "peak_bytes": 2_500_000, "kernels": 40}
    row = {"case": "gpt2-124m", "milliseconds": 4.0, "ideal_milliseconds": 3.0, "contestants": {"ours": ours}}
    (table,) = sweep_tables({"results": [{**row, "host_milliseconds_per_100_matrices": 0.5}]})
    assert table.headings[-3:] == ("host ms / 100 matrices", "peak MB", "kernels")
    assert table.rows == [("gpt2-124m", "4.000", "3.000", "75%", "0.001", "0.50", "2.5", "40")]
