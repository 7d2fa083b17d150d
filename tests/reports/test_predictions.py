"""docs/predictions.md: it has each model's sizes, says nothing that the model does not, and is up to date."""

from __future__ import annotations

import json

import pytest

from benchmarks.predicted_step import PREDICTED
from benchmarks.shapes import MODELS, matrix_counts
from tools.lint.compiled import PACKAGE, kernel_module
from tools.pages.generated import newest
from tools.pages.predictions import GPUS, NAMED, PAGE, RESULTS, page, row_of, sizes_of_models, strict_goal


@pytest.fixture(scope="module")
def predictions():
    return kernel_module(PACKAGE, "speeds.predictions")


@pytest.mark.parametrize("gpu", GPUS)
def test_every_size_of_a_model_and_its_square_are_listed_once(predictions, gpu):
    listed = sizes_of_models(predictions, predictions.Gpu(*GPUS[gpu]))
    sizes = {tuple(sorted(shape)) for name in NAMED for shape in matrix_counts(MODELS[name])}
    assert {(m, k) for _, m, k in listed} == sizes | {(m, m) for m, _ in sizes}
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("m", [64, 128, 256])
def test_where_the_model_is_silent_torch_is_taken_and_the_compiled_time_stays(predictions, m):
    _, torchs, *symmetric, taken, compiled = row_of(predictions, predictions.Gpu(*GPUS["H100 SXM, H200"]), (1, m, m))
    assert float(torchs) > 0 and float(compiled) > 0 and taken == "torch" and not any(symmetric)


def test_the_page_says_rightly_that_the_largest_model_meets_its_goal_at_any_rate_of_adamw():
    """As it is charged, and if it were as fast as a copy."""
    rows = json.loads(newest(RESULTS, "fake-step", "benchmarks.sweep_fake_step").read_text())["results"]
    ways = {row["way"]: row for row in rows if row["model"] == "llama-8b"}
    best = min(ways[way]["predicted_milliseconds"] for way in PREDICTED)
    assert best < strict_goal(rows, "llama-8b") < ways["torch"]["goal_milliseconds"]


def test_the_committed_page_is_what_the_model_says(predictions):
    assert PAGE.read_text() == page(predictions)
