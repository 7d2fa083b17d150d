"""The page of learning rates: it is what its tool makes of the results, and what it says of optimizers holds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from statistics import fmean

import pytest
from matplotlib import pyplot
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from examples.character_model.comparison import optimizers
from examples.character_model.model import CharacterModel
from examples.learning_rates.experiment import run_all
from examples.learning_rates.plan import FULL, MODELS, candidates, finals
from tests.support.small_model import named_parameters
from tools.pages import learning_rates

SHAPES = ((1024, 1024), (4096, 1024), (1024, 4096))


@pytest.fixture(scope="module")
def content() -> dict:
    """A file of results whose losses nobody measured, in the form that the sweep writes."""
    losses = {}
    run_all(FULL, lambda training: losses.setdefault(training.key, 2 + math.log2(training.setting.lr * 50) ** 2))
    facts = {"device": "a processor", "python": "3.11", "torch": "2.13", "commit": "0123456789"}
    rows = [{"case": key, "loss": loss} for key, loss in losses.items()]
    return json.loads(json.dumps({**facts, **asdict(FULL), "results": rows}))


def test_page_is_what_the_tool_makes_of_the_results():
    before = learning_rates.PAGE.read_text()
    made = learning_rates.page(before, learning_rates.results())
    assert made == before, "run `python -m tools.pages.learning_rates`"


def means() -> dict[str, dict[str, float]]:
    """Return the mean loss of every candidate of every model, as measured."""
    content = learning_rates.results()
    size, measure = learning_rates.size_of(content), learning_rates.measured(content)
    return {
        model: {
            name: fmean(map(measure, finals(model, s, size))) for name, s in candidates(model, size, measure).items()
        }
        for model in MODELS
    }


def test_what_the_page_says_of_its_tables_is_in_them():
    text, _, small = means().values()
    advised, small_adamw, kept = "one rate, 0.02", "lr=0.02, adamw_lr=0.003", "AdamW's best rate, the class changed"
    differences = {
        "by {} nats on the characters": text["AdamW, tuned"] - text[advised],
        "by {}\n  from small initial weights": small["AdamW, tuned"] - small[advised],
        "The best pair of rates is {} lower": text[advised] - text["both rates, tuned"],
        "costs {} and": text[small_adamw] - text[advised],
        "and {} on the two": small[small_adamw] - small[advised],
        "ends {} and": text["AdamW, tuned"] - text[kept],
        "and {} below AdamW": small["AdamW, tuned"] - small[kept],
        "`rms_to_rms` is {} behind": text["`rms_to_rms`, both tuned"] - text["both rates, tuned"],
    }
    page = learning_rates.PAGE.read_text()
    assert not [said for said, value in differences.items() if said.format(f"{value:.3f}") not in page]
    assert small["both rates, tuned"] == small[advised]


def test_the_sweep_measures_what_the_page_shows(content):
    tables = learning_rates.page(learning_rates.PAGE.read_text(), content)
    assert "0.02: **2.000** (2.000 to 2.000)" in tables
    drawn = learning_rates.figure(learning_rates.size_of(content), learning_rates.measured(content))
    assert [axes.get_title().replace("\n", " ") for axes in drawn.axes] == list(MODELS)
    pyplot.close(drawn)


def test_a_result_that_is_missing_is_an_error(content):
    fewer = {**content, "results": content["results"][1:]}
    with pytest.raises(KeyError, match=re.escape(content["results"][0]["case"])):
        learning_rates.page(learning_rates.PAGE.read_text(), fewer)


def test_multipliers_are_those_of_the_package(kernel):
    multiplier = kernel.learning_rate.step_multiplier
    written = re.findall(r"^\| `(\w+)`.*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", learning_rates.PAGE.read_text(), re.M)
    assert {name for name, *_ in written} == set(kernel.learning_rate.MULTIPLIERS)
    for name, *cells in written:
        assert [float(cell) for cell in cells] == [pytest.approx(multiplier(name, *shape)) for shape in SHAPES]


@pytest.mark.parametrize("rows", [256, 1024, 4096])
def test_torchs_rate_is_divided_by_what_the_page_says(kernel, rows):
    """0.2 sqrt(columns), for every number of rows."""
    multiplier = kernel.learning_rate.step_multiplier
    assert multiplier("match_rms_adamw", rows, 1024) / multiplier("original", rows, 1024) == pytest.approx(6.4)
    assert "divide `lr` by 0.2 sqrt(columns), 6.4 at 1024" in learning_rates.PAGE.read_text()


def cycled(kernel, scheduler, **options) -> set[float]:
    """Return the momentums that a cycle of twenty steps goes through."""
    optimizer = kernel.Muon(named_parameters().items(), lr=0.02)
    cycle = scheduler(optimizer, **options)
    momentums = set()
    for _ in range(19):
        momentums |= {round(group["momentum"], 6) for group in optimizer.param_groups}
        optimizer.step()
        cycle.step()
    return momentums


@pytest.mark.parametrize(
    "scheduler, options, lowest, highest",
    [
        (OneCycleLR, {"max_lr": 0.02, "total_steps": 20}, 0.85, 0.95),
        (CyclicLR, {"base_lr": 0.01, "max_lr": 0.02, "step_size_up": 5}, 0.8, 0.9),
    ],
)
def test_cycles_move_momentum_unless_they_are_told_not_to(kernel, scheduler, options, lowest, highest):
    moved = cycled(kernel, scheduler, **options)
    assert (min(moved), max(moved)) == pytest.approx((lowest, highest), abs=1e-3)
    assert cycled(kernel, scheduler, cycle_momentum=False, **options) == {0.95}


def test_the_demonstration_has_the_recipe_of_the_page(kernel):
    """One rate for all parameters."""
    optimizer = optimizers(kernel)["Muon"](CharacterModel(20), 0.02)
    assert len(optimizer.param_groups) > 1 and {group["lr"] for group in optimizer.param_groups} == {0.02}
