"""The sweep over models on many ranks has its columns, and a rank's side of them is what a step walks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from benchmarks import sweep_scale
from benchmarks.scale_cases import CASES, TINY_CASES, build_optimizer, imagined, untouched
from tools.pages.tables import sweep_tables


@pytest.fixture(scope="module")
def results(variant, tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "scale.json"
    sweep_scale.main(["--tiny", "--build", str(variant.parent), "--output", str(file)])
    return json.loads(file.read_text())


def test_a_row_has_the_plan_the_step_and_what_it_walks(results):
    (row,) = results["results"]
    assert row["case"] == str(TINY_CASES[0]) and results["threads"] == 1
    low, middle, high = row["host_milliseconds"]
    assert 0 < low <= middle <= high and 0 < row["plan_seconds"] < 1 and 0 <= row["plan_megabytes"]
    # Six dense matrices, and two of the four experts of each of two layers, which are exchanged among other ranks.
    assert row["parts"] == 6 + 2 * 2 and row["chunks"] == 2
    # Of each owned matrix four parts come and go back, in each copy for itself; of an expert likewise.
    assert 0 < row["messages"] <= 2 * 7 and row["owned"] >= 1 and row["blocks"] >= 2 * row["batches"]


def test_the_page_of_results_shows_targets(results):
    measured = results["results"][0]
    (table,) = sweep_tables({"results": [measured, {"case": "another", "status": "unmeasured"}]})
    assert table.rows[0][1] == f"{measured['plan_seconds']:.2f} of 2" and table.rows[0][2].endswith(" of 200")
    assert len(table.rows) == 1 and table.title.endswith("1 of 2 unmeasured")


def test_targets_stand_for_the_models_that_have_one():
    targets = {(case.model, case.ranks): case.target_milliseconds for case in CASES}
    assert targets == {("Llama 70B", 256): 15.0, ("Llama 70B", 1024): None, ("MoE 1T", 1024): 30.0}
    assert all(case.target_seconds == 2.0 for case in CASES) and {case.work_dtype for case in CASES} == {
        "bfloat16",
        "float16",
    }


def test_a_step_goes_its_whole_way_and_what_stood_in_is_gone_after_it(kernel):
    before = torch._foreach_copy_, torch.Tensor.index_select, kernel.step.graphs.polar_updates, dist.all_to_all_single
    with imagined(8), untouched(kernel):
        optimizer = build_optimizer(kernel, TINY_CASES[0])
        for _ in range(3):
            optimizer.step()
        # Of owned matrices; the flags that say which have a gradient are not sent.
        assert sum(len(update.norms) for update in optimizer._norms) > 0
    after = torch._foreach_copy_, torch.Tensor.index_select, kernel.step.graphs.polar_updates, dist.all_to_all_single
    assert after == before and not dist.is_initialized()
