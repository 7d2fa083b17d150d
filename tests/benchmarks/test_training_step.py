"""The share of the optimizer in a training step is measured on a model that trains."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.built_kernel import load_built
from benchmarks.sweep_training_step import TINY_MODEL, Bench, Decoder, make_training, shares
from tools.pages.tables import sweep_tables


@pytest.fixture(scope="module")
def rows(repository, variant, tmp_path_factory):
    """What the tiny sweep writes, by contestant."""
    file = tmp_path_factory.mktemp("results") / "training.json"
    command = [sys.executable, "-m", "benchmarks.sweep_training_step", "--tiny", "--build", variant.parent]
    command += ["--contestants", "torch.optim.Muon,AdamW,gram-newton-schulz", "--output", file]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)
    return {row["contestant"]: row for row in json.loads(file.read_text())["results"]}


def test_the_sweep_has_both_halves_and_their_share(rows):
    for name in ("optimizer", "torch.optim.Muon", "AdamW"):
        row = rows[name]
        halves = row["forward_backward_milliseconds"], row["step_milliseconds"]
        assert all(0 < half[0] and half == sorted(half) for half in halves)
        assert 0 < row["share"][0] <= row["share"][2] < 1 and row["rounds"] >= 3
        assert (row["tokens"], row["parameters"]) == (32, rows["AdamW"]["parameters"])


def test_a_contestant_that_is_missing_has_a_mark_for_a_row(rows):
    row = rows["gram-newton-schulz"]
    assert row["status"] in ("not installed", "needs a GPU") and "share" not in row
    (table,) = sweep_tables({"results": list(rows.values())})
    assert table.rows[-1] == ("tiny", "gram-newton-schulz", "", "", row["status"])


def test_shares_are_of_the_same_round():
    assert shares([3.0, 1.0, 9.0], [1.0, 1.0, 1.0]) == pytest.approx([0.175, 0.25, 0.375])


def test_all_parameters_are_trained_and_the_loss_falls(variant):
    """Gradients are those of the last forward and backward, not their sum over the steps."""
    kernel, _ = load_built(variant.parent)
    bench = Bench(kernel, torch.device("cpu"), ("optimizer",), 1)
    matrices, rest = Decoder(TINY_MODEL).weights()
    assert len(matrices) == 4 * TINY_MODEL.layers
    training = make_training("optimizer", TINY_MODEL, bench)
    assert training.parameters == sum(p.numel() for p in (*matrices, *rest))
    losses = []
    for _ in range(10):
        losses.append(training.back_and_forth())
        training.step()
    assert losses[-1] < losses[0] - 0.01
