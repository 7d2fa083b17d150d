"""One training run: a model, its data in the order of a seed, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .corpus import Corpus
from .model import CONTEXT, WIDTH, CharacterModel, loss_of

BATCH = 16
EVALUATION_BATCH = 64
WARM_UP = 20  # steps


@dataclass(frozen=True)
class Run:
    """One training run; together with the corpus it decides the result."""

    optimizer: str
    lr: float
    steps: int
    seed: int


@dataclass
class Record:
    """What a run measured."""

    run: Run
    steps: list[int] = field(default_factory=list)  # where the validation loss was taken
    validation: list[float] = field(default_factory=list)  # nats, as the problem's `validate` gives them
    seconds: list[float] = field(default_factory=list)  # of training until then; evaluation stops the clock
    train: list[float] = field(default_factory=list)  # at every step
    gradient_ms: list[float] = field(default_factory=list)  # forward and backward, at every step
    optimizer_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Problem:
    """What is learned."""

    model: Callable[[], nn.Module]  # a new one, from torch's random state
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]  # the mean over a batch, in nats
    validate: Callable[[nn.Module], float]  # the mean over what is held out, in nats


@dataclass(frozen=True)
class Task:
    """What all runs share."""

    problem: Problem
    make: dict[str, Callable[[nn.Module, float], Optimizer]]  # name -> (model, lr) -> optimizer
    evaluations: int  # per run, besides the one at its end


def next_character(corpus: Corpus, windows: int, width: int = WIDTH) -> Problem:
    """Return the problem of a character model; `windows` of the validation text are held out."""
    held_out = corpus.validation_windows(windows, CONTEXT + 1)
    return Problem(
        model=lambda: CharacterModel(corpus.symbols, width),
        batch=lambda generator: corpus.batch(BATCH, CONTEXT + 1, generator),
        loss=loss_of,
        validate=lambda model: loss_over(model, held_out),
    )


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the share of the full learning rate at `step`: warm-up, then a straight line down to zero."""
    return min((step + 1) / WARM_UP, 1.0) * (steps - step) / steps


def train(run: Run, task: Task, on_step: Callable[[Run], object]) -> tuple[Record, nn.Module, Optimizer]:
    """Train a new model as `run` says. Two runs with one seed see the same first weights and the same batches."""
    torch.manual_seed(run.seed)
    model = task.problem.model()
    optimizer = task.make[run.optimizer](model, run.lr)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, run.steps))
    batches = torch.Generator().manual_seed(run.seed)
    record = Record(run)
    every = max(run.steps // task.evaluations, 1)
    for step in range(run.steps):
        if step % every == 0:
            evaluate(model, task.problem, record)
        batch = task.problem.batch(batches)
        started = perf_counter()
        loss = task.problem.loss(model, batch)
        loss.backward()
        differentiated = perf_counter()
        optimizer.step()
        stepped = perf_counter()
        optimizer.zero_grad()
        scheduler.step()
        record.train.append(loss.item())
        record.gradient_ms.append(1e3 * (differentiated - started))
        record.optimizer_ms.append(1e3 * (stepped - differentiated))
        on_step(run)
    evaluate(model, task.problem, record)
    return record, model, optimizer


@torch.no_grad()
def evaluate(model: nn.Module, problem: Problem, record: Record) -> None:
    """Append the loss over what is held out to `record`."""
    model.eval()
    record.steps.append(len(record.train))
    record.validation.append(problem.validate(model))
    record.seconds.append((sum(record.gradient_ms) + sum(record.optimizer_ms)) / 1e3)
    model.train()


def loss_over(model: nn.Module, windows: Tensor) -> float:
    """Return the mean loss over windows (count, CONTEXT + 1)."""
    return sum(loss_of(model, part).item() * len(part) for part in windows.split(EVALUATION_BATCH)) / len(windows)
