"""The share of the optimizer in a training step is measured on a model that trains."""

from __future__ import annotations

import pytest
import torch

from benchmarks.built_kernel import load_built
from benchmarks.sweep_training_step import TINY_MODEL, Bench, main, make_training, shares
from benchmarks.timing import WARM_UP, Deadline, run_rounds
from tests.support.tiny_sweeps import run_sweep
from tools.pages.tables import sweep_tables


@pytest.fixture(scope="module")
def rows(variant, tmp_path_factory):
    """What the tiny sweep writes, by contestant."""
    file = tmp_path_factory.mktemp("results") / "training.json"
    content = run_sweep(main, variant, file, "--contestants", "torch.optim.Muon,AdamW,gram-newton-schulz")
    return {row["contestant"]: row for row in content["results"]}


def test_each_contestant_steps_right_after_its_own_backward_pass():
    """Contestants take turns in an order that changes, and none works between the halves of another."""
    calls, names = [], ("ours", "theirs", "AdamW")
    halves = {f"{name} {half}": name for name in names for half in ("backward", "step")}
    works = {each: lambda each=each: calls.append(each) for each in halves}
    times = run_rounds(works, torch.device("cpu"), 6, Deadline(), halves)
    pairs = list(zip(calls[::2], calls[1::2]))
    assert all(pair == (f"{halves[pair[0]]} backward", f"{halves[pair[0]]} step") for pair in pairs)
    rounds = [tuple(pairs[start : start + 3]) for start in range(0, len(pairs), 3)]
    assert len(rounds) == WARM_UP + 6 and len(set(rounds)) > 1 and all(len(set(each)) == 3 for each in rounds)
    assert all(len(times[each]) == 6 for each in halves)


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
    assert rows["optimizer, warmed up"]["status"] == "needs a GPU"
    (table,) = sweep_tables({"results": list(rows.values())})
    assert table.rows[-1] == ("tiny", "gram-newton-schulz", "", "", row["status"])


def test_shares_are_of_the_same_round():
    assert shares([3.0, 1.0, 9.0], [1.0, 1.0, 1.0]) == pytest.approx([0.175, 0.25, 0.375])


@pytest.fixture
def training(variant):
    """Ours, of a tiny model."""
    kernel, _ = load_built(variant.parent)
    return make_training("optimizer", TINY_MODEL, Bench(kernel, torch.device("cpu"), ("optimizer",), 1))


def test_the_loss_falls_and_every_parameter_moves(training):
    weights = (*training.weights.matrices, *training.weights.rest)
    before = [p.detach().clone() for p in weights]
    losses = []
    for _ in range(10):
        losses.append(training.back_and_forth())
        training.step()
    assert losses[-1] < losses[0] - 0.01
    assert not any(torch.equal(p, old) for p, old in zip(weights, before))


def test_gradients_are_of_one_forward_and_backward(training):
    """They are no sums over rounds."""
    gradients = []
    for _ in range(2):
        training.back_and_forth()
        gradients.append([p.grad.clone() for p in training.weights.matrices])
    torch.testing.assert_close(*gradients)


def test_a_decoder_has_the_weights_of_its_size(training):
    matrices, rest = training.weights
    width, layers = TINY_MODEL.width, TINY_MODEL.layers
    assert sum(p.numel() for p in matrices) == 12 * layers * width**2
    embedded = 2 * TINY_MODEL.vocabulary + TINY_MODEL.length
    assert sum(p.numel() for p in rest) == embedded * width + (2 * layers + 1) * 2 * width
