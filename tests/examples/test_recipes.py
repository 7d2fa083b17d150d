"""The comparison of recipes: each trains, rates are tuned, and the page is what its tool makes of the results."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.peers import MissingError
from benchmarks.result_file import ResultFile
from examples.character_model.model import WIDTH, CharacterModel, loss_of
from examples.recipes import experiment, trials
from examples.recipes.contenders import CONTENDERS, PARAMETRIZATIONS
from examples.recipes.experiment import last_words, output_of
from examples.recipes.trials import QUICK, Job, of_recipe, of_width, tuned
from tools.pages import recipes


@pytest.mark.parametrize("each", [*CONTENDERS, *PARAMETRIZATIONS], ids=lambda each: each.name)
def test_every_recipe_moves_every_parameter(kernel, each):
    model = CharacterModel(20)
    try:
        optimizer = each.make(kernel, model, 1e-2, 1e-2)
    except MissingError as missing:
        pytest.skip(f"{each.name} is {missing}")
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, torch.arange(65).remainder(20)[None]).backward()
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))


@pytest.mark.parametrize("best", [2.5e-3, 2e-2, 1.6e-1])
def test_the_best_rate_has_a_worse_one_on_either_side(best):
    losses = {}

    def loss(lr: float) -> float:
        return losses.setdefault(lr, abs(math.log2(lr / best)) if lr < 0.3 else math.nan)

    assert tuned(loss, losses, 2e-2, 8) == best
    assert {best / 2, best * 2} <= losses.keys()


def test_as_many_rates_are_tried_as_may_be():
    losses = {}
    assert tuned(lambda lr: losses.setdefault(lr, lr), losses, 1.0, 3) == 0.25


def test_runs_come_again_with_their_bits(kernel):
    """A row that is measured again, without a change of what it runs, is the same."""
    first, second = (of_recipe(Job("NorMuon", 1e-2), QUICK, kernel) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert len(first["trials"]) == QUICK.most_trials and len(first["validation"]) == len(QUICK.seeds)
    assert first["lr"] == min(first["trials"], key=lambda trial: trial[1])[0]


def test_widths_are_those_of_the_model(kernel, monkeypatch):
    built = []

    def train(run, task, on_step):
        built.append(task.problem.model().lm_head.in_features)
        return [Trained()]

    monkeypatch.setattr(trials, "train", train)
    record = of_width(Job(PARAMETRIZATIONS[0].name, 1e-2, 96), QUICK, kernel)
    assert built == [96] * QUICK.most_trials == [record["width"]] * len(record["trials"])


class Trained:
    """What a run returns, as far as trials read it."""

    validation = (1.0,)


@pytest.mark.parametrize("topic", ["recipes", "learning-rates"])
def test_a_quick_run_leaves_the_results_of_the_pages_alone(topic):
    """A page is made of the newest file, and another run of that day would not go on with a quick one's."""
    path = output_of(Namespace(output=None, quick=False), topic)
    assert path.parent == recipes.RESULTS and path.name.startswith(f"{topic}-cpu-")
    quick, file = Namespace(output=None, quick=True), Path("of a quick run.json")
    assert output_of(quick, topic) is None and output_of(Namespace(output=file, quick=True), topic) == file
    assert last_words(quick, None, "recipes") == "This was --quick: it judges nothing."


def test_what_others_have_measured_stays_where_one_fails(monkeypatch):
    def work(job: Job, *_: object) -> dict:
        if job.name == "Muon+":
            raise OSError("the disk is full")
        return {"lr": job.adamw_lr}

    monkeypatch.setattr(experiment, "work", work)
    rows, some = {}, [Job(name, 1e-2) for name in ("Muon", "Muon+", "NorMuon")]
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=r"Muon\+: OSError: the disk is full$"):
        experiment.run_jobs(some, QUICK, ResultFile(None, {}, []), pool, lambda job, row: rows.update({job.name: row}))
    assert sorted(rows) == ["Muon", "NorMuon"]


def test_rows_of_the_results_can_be_compared():
    """Plain Muon's trials are among those of the same width, which other runs, and perhaps another commit, measured."""
    rows = {row["case"]: row for row in recipes.results()["results"]}
    same = rows[f"{PARAMETRIZATIONS[0].name}, width {WIDTH}"]
    assert all(trial in same["trials"] for trial in rows["Muon"]["trials"])


def test_page_is_what_the_tool_makes_of_the_results():
    before = recipes.PAGE.read_text()
    assert recipes.page(before, recipes.results()) == before, "run `python -m tools.pages.recipes`"
