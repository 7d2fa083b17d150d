"""The sweep of learning rates: every optimizer trains every model, the best rates are chosen, runs come again."""

from __future__ import annotations

import dataclasses
import math
from statistics import fmean

import pytest
import torch

from examples.learning_rates import digits
from examples.learning_rates.experiment import run_all
from examples.learning_rates.plan import (
    ADAMW,
    FULL,
    MATCH,
    MODELS,
    QUICK,
    Setting,
    Training,
    Trials,
    candidates,
    finals,
)
from examples.learning_rates.problems import SMALL, loss_after, optimizer_of, problem_of

WINDOWS = 16
FIXED = (1e-3, 1e-2, 2e-2, 4e-2)
# Rates of a surface of losses whose lowest points are known; those of the others lie outside the grid of MATCH.
BEST = {ADAMW: (4e-2, 4e-2), MATCH: (1e-2, 4e-2), "original": (0.16, 1e-2), "rms_to_rms": (2.5e-3, 0.16)}


def surface(training: Training) -> float:
    """Return a loss that grows with the distance from the best rates, in factors of two."""
    best, setting = BEST.get(training.setting.optimizer, BEST[MATCH]), training.setting
    return abs(math.log2(setting.lr / best[0])) + abs(math.log2(setting.adamw_lr / best[1]))


def used_with(model: str) -> set[str]:
    return {setting.optimizer for setting in candidates(model, FULL, surface).values()}


@pytest.mark.parametrize("model, optimizer", [(model, name) for model in MODELS for name in sorted(used_with(model))])
def test_every_optimizer_moves_every_parameter(kernel, model, optimizer):
    problem = problem_of(model, WINDOWS)
    module = problem.model()
    stepping = optimizer_of(kernel, module, Setting(optimizer, 1e-2, 1e-2))
    before = [p.detach().clone() for p in module.parameters()]
    problem.loss(module, problem.batch(torch.Generator().manual_seed(0))).backward()
    stepping.step()
    assert not any(torch.equal(p, old) for p, old in zip(module.parameters(), before))


def test_rates_reach_the_parameters_they_are_for(kernel):
    module = problem_of("digits", WINDOWS).model()
    optimizer = optimizer_of(kernel, module, Setting(MATCH, 3e-2, 5e-3))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    problem = problem_of("digits", WINDOWS)
    problem.loss(module, problem.batch(torch.Generator().manual_seed(0))).backward()
    optimizer.step()
    # A first step of AdamW moves each element by its rate, but for the decay and for elements without a gradient.
    head = (module.head.weight - before["head.weight"] * (1 - 5e-3 * 0.1)).abs()
    assert head.median().item() == pytest.approx(5e-3, rel=1e-3)
    # One of Muon has a root mean square of 0.2 times its rate, within the error of five iterations.
    moved = module.down.weight - before["down.weight"] * (1 - 3e-2 * 0.1)
    assert moved.square().mean().sqrt().item() == pytest.approx(0.2 * 3e-2, rel=0.15)


def test_the_best_rates_are_found():
    chosen = candidates("characters", FULL, surface)
    assert chosen["AdamW, tuned"] == Setting(ADAMW, *BEST[ADAMW])
    assert chosen["both rates, tuned"] == Setting(MATCH, *BEST[MATCH])
    # On the diagonal every rate between the best two is as good: the first of them.
    assert chosen["one rate, tuned"] == Setting(MATCH, 1e-2, 1e-2)
    for name in MODELS["characters"].others:
        assert chosen[f"`{name}`, both tuned"] == Setting(name, *BEST[name])
    assert chosen["AdamW's best rate, the class changed"] == Setting(MATCH, 4e-2, 4e-2)
    assert {chosen[f"one rate, {lr:g}"] for lr in FIXED} == {Setting(MATCH, lr, lr) for lr in FIXED}


def test_trials_and_finals_share_no_seed():
    for model, grid in MODELS.items():
        of_finals = {training.seed for training in finals(model, Setting(MATCH, 1e-2, 1e-2), FULL)}
        assert len(of_finals) >= 3 and of_finals.isdisjoint(grid.trial_seeds)


def test_a_trial_is_the_mean_over_its_seeds():
    trials = Trials("digits", FULL, lambda training: float(training.seed))
    assert trials.loss(Setting(MATCH, 1e-2, 1e-2)) == fmean(MODELS["digits"].trial_seeds)


def test_rates_without_a_loss_are_not_the_best():
    trials = Trials("digits", FULL, lambda training: surface(training) if training.setting.lr > 5e-3 else math.nan)
    assert trials.best_of_grid() == Setting(MATCH, *BEST[MATCH])


def test_keys_tell_all_trainings_apart():
    asked = []
    run_all(FULL, lambda training: asked.append(training) or surface(training))
    assert len({training.key for training in asked}) == len(set(asked))
    assert {training.steps for training in asked} == {FULL.trial_steps, FULL.final_steps, FULL.longest_steps}


@pytest.mark.parametrize("model", MODELS)
def test_a_training_comes_again_with_its_bits(kernel, model):
    training = Training(model, Setting(MATCH, 1e-2, 1e-2), QUICK.longest_steps, seed=0)
    losses = {loss_after(training, kernel, WINDOWS) for _ in range(2)}
    other = loss_after(dataclasses.replace(training, seed=1), kernel, WINDOWS)
    assert len(losses) == 1 and other not in losses


def test_no_image_is_for_training_and_held_out():
    """With nothing moved, a batch has images of the third that is trained on alone."""
    count = len(digits.load_digits().images)
    images, labels = torch.arange(count, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 1, 8, 8), torch.zeros(count)
    batch, _ = digits.batch_of(*digits.for_training(images, labels), torch.Generator().manual_seed(0))
    kept, _ = digits.for_validation(images, labels)
    seen = set(batch[:, 0, 4, 4].tolist())
    assert len(seen) > 1 and seen.isdisjoint(kept[:, 0, 0, 0].tolist())


def test_small_weights_are_small():
    module = problem_of("characters, small initial weights", WINDOWS).model()
    for weight in (module.tok_embeddings.weight, module.layers[0].attn.qkv.weight, module.lm_head.weight):
        # The error of a standard deviation of n normal numbers is one part in sqrt(2 n): five of them.
        assert weight.std().item() == pytest.approx(SMALL, rel=5 / math.sqrt(2 * weight.numel()))
