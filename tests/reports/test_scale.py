"""The scale report: its plans are the optimizer's, its table and figure are made of its results, and docs/ has them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import shapes
from tools.scale import models, plans, report, schemes, tables
from tools.scale.models import Weights
from tools.scale.plans import ASSUMED, Machine
from tools.scale.schemes import Case

MACHINE = Machine(link_gb_per_s=1.0, microseconds_per_peer=2.0, tflop_per_s=0.5)


@pytest.fixture
def tiny(monkeypatch):
    """A model of ten matrices and two layers of experts."""
    weights = [Weights("up", (64, 128), 10), Weights("experts.up", (64, 32, 64), 2)]
    monkeypatch.setitem(models.MODELS, "tiny", weights)
    monkeypatch.setattr(plans, "SHARDS", 32)
    return "tiny"


def test_plan_of_one_copy_follows_the_formulas(kernel, tiny):
    row = schemes.plan(kernel, Case(tiny, 10, "bfloat16"), MACHINE, chunk_bytes=2**20)
    assert (row.matrices, row.chunks) == (10 + 2 * 64, 1)
    # Ten ranks own one matrix each, 4 m² n + 2 m³ a step; a matrix 64 x 128 is of 7 rows on each but the last.
    assert row.flop >= 5 * (4 * 64 * 64 * 128 + 2 * 64**3)
    assert row.imbalance < 1.2


@pytest.mark.parametrize("planned, stepped", {"Llama 8B": "llama-8b", "Llama 70B": "llama-70b"}.items())
def test_models_that_are_planned_have_the_matrices_of_those_that_step(planned, stepped):
    matrices = sorted(each.shape for each in models.MODELS[planned] for _ in range(each.count))
    assert matrices == sorted(p.shape for p in shapes.MODELS[stepped] if p.matrix)


def test_whole_experts_stay_on_their_ranks(kernel, tiny, monkeypatch):
    monkeypatch.setitem(models.MODELS, "tiny", [Weights("experts.up", (64, 32, 64), 2)])
    row = schemes.plan(kernel, Case(tiny, 64, "bfloat16"), MACHINE, chunk_bytes=2**20)
    assert (row.chunks, row.sent_bytes, row.held_bytes, row.imbalance) == (0, 0, 0, 1.0)
    assert row.flop == 2 * 5 * (4 * 32 * 32 * 64 + 2 * 32**3)
    assert row.seconds["at best"] == pytest.approx(row.flop / 0.5e12)


def test_planned_owners_are_no_slower_than_round_robin(kernel, tiny):
    """Of few sizes of matrices; and no step is faster than its products."""
    for gpus in (16, 64, 128):
        row = schemes.plan(kernel, Case(tiny, gpus, "bfloat16"), MACHINE, chunk_bytes=4096)
        assert row.seconds["at best"] <= row.seconds["round robin"] * (1 + 1e-9)
        assert row.seconds["in chunks"] >= MACHINE.products(row.flop / plans.STEPS)


def test_float16_products_gather_four_bytes_an_element(kernel, tiny):
    """And scatter two, as bfloat16 does both ways: ways are as long but for padding, so half as much again is sent."""
    rows = [schemes.plan(kernel, Case(tiny, 2, dtype), MACHINE, chunk_bytes=2**20) for dtype in plans.WIRE]
    assert [row.dtype for row in rows] == ["bfloat16", "float16"]
    assert rows[1].sent_bytes == pytest.approx(1.5 * rows[0].sent_bytes, rel=0.02)
    assert rows[1].held_bytes > 1.3 * rows[0].held_bytes


def test_training_step_counts_what_works_on_a_token(kernel, tiny):
    weights = [Weights("up", (64, 128), 10), Weights("experts.up", (64, 32, 64), 2, used=2 / 64)]
    assert schemes.training_flop(weights) == 6 * schemes.TOKENS * (10 * 64 * 128 + 2 * 2 * 32 * 64)


def test_rates_that_plans_count_with_are_the_assumed_ones(kernel):
    costs = kernel.plan.costs
    assert costs.FLOPS_PER_SECOND == 1e12 * ASSUMED.tflop_per_s
    assert costs.BYTES_PER_SECOND == 1e9 * ASSUMED.link_gb_per_s
    assert costs.SECONDS_PER_PEER == 1e-6 * ASSUMED.microseconds_per_peer


def test_report_writes_results_table_and_figure(kernel, tiny, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- scale -->\nold\n<!-- end -->\nbetween\n<!-- schemes -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "scale.json")
    monkeypatch.setattr(report, "FIGURE", tmp_path / "scale.png")
    monkeypatch.setattr(report, "load_variant", lambda folder: kernel)
    build = str(Path(kernel.__file__).parents[1])
    report.main(["--build", build, "--models", tiny, "--gpus", "8", "64", "--write"])
    results = json.loads((tmp_path / "scale.json").read_text())
    assert [(row["gpus"], row["dtype"]) for row in results["rows"]] == [
        (8, "bfloat16"),
        (8, "float16"),
        (64, "bfloat16"),
        (64, "float16"),
    ]
    made = tables.tables(results, {})
    assert all(table in page.read_text() for table in made.values())
    assert "old" not in page.read_text()
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert "tiny" in capsys.readouterr().out


def test_measured_host_time_stands_beside_its_case(kernel, tiny, tmp_path, monkeypatch):
    row = schemes.plan(kernel, Case(tiny, 1024, "float16"), MACHINE)
    measured = {"case": "tiny on 1,024 ranks, float16", "host_milliseconds": [1.0, 12.34, 20.0]}
    (tmp_path / "sweep.json").write_text(json.dumps({"results": [measured, {"case": "another"}]}))
    monkeypatch.setattr(report, "RESULTS", tmp_path / "scale.json")
    results = {"machine": vars(MACHINE), "commit": "a" * 40, "dirty": False, "rows": [asdict(row)]}
    assert tables.tables(results, report.measured_host())["scale"].splitlines()[2].endswith("| 12.3 |")
    assert tables.tables(results, {})["scale"].splitlines()[2].endswith("| - |")


def test_docs_have_the_tables_of_the_results_files(repository):
    results = json.loads((repository / "benchmarks/results/scale-model.json").read_text())
    page = (repository / "docs/distributed.md").read_text()
    assert report.filled(page, results) == page


def test_page_without_markers_raises():
    with pytest.raises(ValueError, match="markers"):
        report.markdown.fill("nothing", {"scale": ""})
