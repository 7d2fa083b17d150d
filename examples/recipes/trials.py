"""The runs of one recipe, in a process of its own: short ones find its learning rate, long ones what it reaches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import kernels
import torch

from ..character_model.comparison import TRIAL_SEED
from ..character_model.corpus import Corpus, read_corpus, standard_library
from ..character_model.model import WIDTH
from ..character_model.training import Record, Run, Task, next_character, train
from .contenders import CONTENDERS, PARAMETRIZATIONS, Make


@dataclass(frozen=True)
class Size:
    """How much is run."""

    trial_steps: int
    final_steps: int
    seeds: tuple[int, ...]
    evaluations: int
    windows: int  # of the validation text
    most_trials: int  # learning rates of a recipe, and of each width


FULL = Size(200, 300, (0, 1, 2), 15, 400, 8)
QUICK = Size(4, 6, (0,), 2, 16, 2)


@dataclass(frozen=True)
class Job:
    """What a process does: a recipe with all its runs, or, with a `width`, a parametrization's trials there."""

    name: str
    adamw_lr: float
    width: int | None = None

    @property
    def key(self) -> str:
        return self.name if self.width is None else f"{self.name}, width {self.width}"


def work(job: Job, size: Size, repo_id: str, version: int) -> dict:
    """Return what `job` measured, as JSON has it; the kernel is loaded from the Hub that the environment names."""
    torch.set_num_threads(1)
    kernel = load(repo_id, version)
    return of_recipe(job, size, kernel) if job.width is None else of_width(job, size, kernel)


@functools.cache
def load(repo_id: str, version: int) -> ModuleType:
    return kernels.get_kernel(repo_id, version=version, backend="cpu", trust_remote_code=True)


@functools.cache
def corpus() -> Corpus:
    return read_corpus(standard_library())


def of_recipe(job: Job, size: Size, kernel: ModuleType) -> dict:
    """Tune a recipe's learning rate, and train with the best from each seed."""
    contender = next(each for each in CONTENDERS if each.name == job.name)
    losses: dict[float, float] = {}

    def loss(lr: float) -> float:
        run = Run(job.name, lr, size.trial_steps, TRIAL_SEED)
        return losses.setdefault(lr, trained(run, job, size, contender.make, kernel, 1).validation[-1])

    lr = tuned(loss, losses, contender.start, size.most_trials)
    finals = [
        trained(Run(job.name, lr, size.final_steps, seed), job, size, contender.make, kernel, size.evaluations)
        for seed in size.seeds
    ]
    return {
        "lr": lr,
        "adamw_lr": job.adamw_lr,
        "trials": sorted(losses.items()),
        "steps": finals[0].steps,
        "validation": [record.validation for record in finals],
    }


def of_width(job: Job, size: Size, kernel: ModuleType) -> dict:
    """Train a model of one width with each learning rate of a parametrization."""
    parametrization = next(each for each in PARAMETRIZATIONS if each.name == job.name)
    losses = []
    for lr in parametrization.rates[: size.most_trials]:
        run = Run(job.name, lr, size.trial_steps, TRIAL_SEED)
        losses.append((lr, trained(run, job, size, parametrization.make, kernel, 1).validation[-1]))
    return {"width": job.width, "adamw_lr": job.adamw_lr, "trials": losses}


def tuned(loss: Callable[[float], float], losses: dict[float, float], start: float, most: int) -> float:
    """Return the learning rate of the lowest loss, by factors of two from `start`, with a higher one on either side.

    `loss` is asked for `most` rates at most, and keeps its answers in `losses`.
    """
    loss(start)
    while len(losses) < most:
        best = min(losses, key=lambda lr: _worth(losses[lr]))
        missing = [lr for lr in (best / 2, best * 2) if lr not in losses]
        if not missing:
            break
        loss(missing[0])
    return min(losses, key=lambda lr: _worth(losses[lr]))


def _worth(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def trained(run: Run, job: Job, size: Size, make: Make, kernel: ModuleType, evaluations: int) -> Record:
    makers = {run.optimizer: lambda model, lr: make(kernel, model, lr, job.adamw_lr)}
    task = Task(next_character(corpus(), size.windows, job.width or WIDTH), makers, evaluations)
    return train(run, task, lambda run: None)[0]
