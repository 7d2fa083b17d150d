"""The comparison: short trials choose a learning rate for each optimizer, then both train from several seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from types import ModuleType

import numpy as np
from torch import nn
from torch.optim import AdamW, Optimizer

from .corpus import Corpus
from .model import CharacterModel
from .training import Record, Run, Task, next_character, train

TRIAL_SEED = 1000  # no final run has it
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Plan:
    """How much is run. Learning rates ascend, by factors of two in the full plan."""

    learning_rates: dict[str, tuple[float, ...]]
    trial_steps: int
    final_steps: int
    seeds: tuple[int, ...]
    evaluations: int
    windows: int

    @property
    def total_steps(self) -> int:
        trials = sum(map(len, self.learning_rates.values()))
        return trials * self.trial_steps + len(self.learning_rates) * len(self.seeds) * self.final_steps


FULL = Plan({"AdamW": (5e-3, 1e-2, 2e-2), "Muon": (2e-2, 4e-2, 8e-2)}, 200, 300, (0, 1, 2), 15, 400)
QUICK = Plan({"AdamW": (1e-2,), "Muon": (2e-2,)}, 10, 20, (0,), 4, 64)


@dataclass(frozen=True)
class Comparison:
    """What was run; `model` and `muon` are as Muon's last run left them."""

    plan: Plan
    trials: list[Record]
    finals: list[Record]
    model: CharacterModel
    muon: Optimizer

    def finals_of(self, optimizer: str) -> list[Record]:
        return [record for record in self.finals if record.run.optimizer == optimizer]

    def chosen(self, optimizer: str) -> float:
        return self.finals_of(optimizer)[0].run.lr

    def curve(self, optimizer: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return steps (n,), median seconds (n,) and validation losses (seeds, n) of the final runs."""
        records = self.finals_of(optimizer)
        seconds = np.median([record.seconds for record in records], axis=0)  # one run may have been held up
        return np.array(records[0].steps), seconds, np.array([record.validation for record in records])

    def mean_loss(self, optimizer: str) -> float:
        """Mean final validation loss in nats per character."""
        return fmean(record.validation[-1] for record in self.finals_of(optimizer))

    def step_ms(self, optimizer: str) -> tuple[float, float]:
        """Median milliseconds of forward and backward, and of the optimizer, over all steps of the final runs."""
        records = self.finals_of(optimizer)
        gradient, stepping = ([ms for r in records for ms in getattr(r, f)] for f in ("gradient_ms", "optimizer_ms"))
        return median(gradient), median(stepping)

    def match(self) -> tuple[float, float] | None:
        """Return the step and the second at which Muon's mean loss is AdamW's final one; None if it never is."""
        steps, seconds, losses = self.curve("Muon")
        target, mean = self.mean_loss("AdamW"), losses.mean(axis=0)
        below = np.flatnonzero(mean <= target)
        if not len(below) or below[0] == 0:
            return None
        last = slice(below[0] - 1, below[0] + 1)
        return tuple(float(np.interp(-target, -mean[last], axis[last])) for axis in (steps, seconds))


def optimizers(kernel: ModuleType) -> dict[str, Callable[[nn.Module, float], Optimizer]]:
    """Return how each contender is made, with one rate for all parameters; torch's fused AdamW is its fastest."""
    return {
        "AdamW": lambda model, lr: AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True),
        "Muon": lambda model, lr: kernel.Muon(
            model.named_parameters(), lr=lr, weight_decay=WEIGHT_DECAY, adamw_betas=BETAS
        ),
    }


def compare(kernel: ModuleType, corpus: Corpus, plan: Plan, on_step: Callable[[Run], object]) -> Comparison:
    """Run all of `plan`; `on_step` is called after each step of each run."""
    problem = next_character(corpus, plan.windows)
    trial = Task(problem, optimizers(kernel), evaluations=1)
    final = Task(problem, optimizers(kernel), plan.evaluations)
    trials, chosen = [], {}
    for name, rates in plan.learning_rates.items():
        tried = [train(Run(name, lr, plan.trial_steps, TRIAL_SEED), trial, on_step)[0] for lr in rates]
        chosen[name] = min(tried, key=lambda record: record.validation[-1]).run.lr
        trials += tried
    finals = []
    for seed in plan.seeds:
        # In turn, so that whatever else the machine does falls on both.
        for name, lr in chosen.items():
            record, model, optimizer = train(Run(name, lr, plan.final_steps, seed), final, on_step)
            finals.append(record)
    return Comparison(plan, trials, finals, model, optimizer)
