"""The comparison of `make demo`, on little text and in few steps: its files, its fairness, and that it can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.character_model import experiment, figures, report
from examples.character_model.comparison import Comparison, Plan, compare
from examples.character_model.corpus import BLOCK, HOLD_OUT_EVERY, read_corpus, standard_library
from examples.character_model.loading import origin_of

RATES = {"AdamW": (5e-3, 1e-2), "Muon": (2e-2,)}
PLAN = Plan(RATES, trial_steps=2, final_steps=4, seeds=(0, 1), evaluations=2, windows=8)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus(standard_library()[: 2 * HOLD_OUT_EVERY * BLOCK])


@pytest.fixture(scope="module")
def comparison(kernel, corpus) -> Comparison:
    steps = []
    compared = compare(kernel, corpus, PLAN, steps.append)
    assert len(steps) == PLAN.total_steps
    return compared


def worse(comparison: Comparison, loss: float) -> Comparison:
    """Return `comparison` with `loss` as the last of each of Muon's runs."""
    finals = [
        replace(record, validation=[*record.validation[:-1], loss]) if record.run.optimizer == "Muon" else record
        for record in comparison.finals
    ]
    return replace(comparison, finals=finals)


def test_every_figure_and_table_is_written(comparison, corpus, kernel, tmp_path):
    content = report.summary(comparison, corpus, origin_of(kernel))
    report.write(comparison, content, tmp_path)
    for name in figures.draw_all(comparison, kernel, tmp_path):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (tmp_path / f"{name}.svg").read_text()
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert [len(record["train"]) for record in runs["finals"]] == [PLAN.final_steps] * 4
    assert "layers.{0,1}.mlp.up.weight" in (tmp_path / "routing.txt").read_text()


def test_summary_names_versions_corpus_and_losses(comparison, corpus, kernel):
    content = json.loads(json.dumps(report.summary(comparison, corpus, origin_of(kernel))))
    assert content["versions"]["torch"] == torch.__version__
    assert set(content["versions"]["optimizer"]) >= {"variant", "id", "pin", "commit", "dirty", "kind"}
    assert content["corpus"]["sha256"] == corpus.sha256
    for of_name in content["results"].values():
        losses = of_name["validation_loss"]
        assert losses["min"] <= losses["mean"] <= losses["max"]
        assert of_name["lr_is_at_the_edge_of_the_trial"]


def test_optimizers_start_from_the_same_model_and_batch(comparison):
    adamw, muon = comparison.finals_of("AdamW"), comparison.finals_of("Muon")
    for ours, theirs in zip(adamw, muon):
        assert ours.run.seed == theirs.run.seed
        assert (ours.validation[0], ours.train[0]) == (theirs.validation[0], theirs.train[0])


@pytest.mark.parametrize("loss", [100.0, float("nan")])
def test_demo_fails_unless_muon_is_better(loss, comparison, kernel, tmp_path, monkeypatch, capsys):
    origin = origin_of(kernel)
    monkeypatch.setattr(experiment, "load_by_version_and_commit", lambda *asked: (kernel, origin, origin))
    monkeypatch.setattr(experiment, "compare", lambda *asked: worse(comparison, loss))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # the other tests keep theirs
    monkeypatch.setattr("sys.argv", ["experiment", "--output", str(tmp_path)])
    assert experiment.main() == 1
    assert "is NOT below AdamW's" in capsys.readouterr().out


def test_validation_text_is_never_trained_on():
    """No window mixes rows of the text."""
    letters = bytes(range(33, 33 + 2 * HOLD_OUT_EVERY))  # row i holds nothing but letter i
    corpus = read_corpus(b"".join(bytes([letter]) * BLOCK for letter in letters))
    batch = corpus.batch(500, 65, torch.Generator().manual_seed(0))
    held_out = corpus.validation_windows(100, 65)
    assert all(len(window.unique()) == 1 for window in torch.cat([batch, held_out]))
    assert set(held_out[:, 0].tolist()) == {HOLD_OUT_EVERY - 1, 2 * HOLD_OUT_EVERY - 1}
    assert not set(held_out[:, 0].tolist()) & set(batch[:, 0].tolist())


def test_kernel_with_changed_files_is_refused(kernel, tmp_path):
    variant = tmp_path / "variant"
    shutil.copytree(Path(kernel.__file__).parent, variant)
    with (variant / "muon.py").open("a") as file:
        file.write("\n")
    with pytest.raises(RuntimeError, match=r"not what was built: muon\.py"):
        origin_of(SimpleNamespace(__file__=str(variant / "__init__.py")))


def test_examples_import_from_the_repository_root(repository):
    """As `make demo` runs it, with nothing else on its path."""
    command = [sys.executable, "-c", "import examples.character_model.experiment, examples.train_fsdp2"]
    subprocess.run(command, cwd=repository, env={**os.environ, "PYTHONPATH": ""}, check=True, timeout=120)
