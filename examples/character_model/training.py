"""One training run: a model, its data in the order of a seed, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

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
    validation: list[float] = field(default_factory=list)  # nats per character
    seconds: list[float] = field(default_factory=list)  # of training until then; evaluation stops the clock
    train: list[float] = field(default_factory=list)  # at every step
    gradient_ms: list[float] = field(default_factory=list)  # forward and backward, at every step
    optimizer_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """What all runs share."""

    corpus: Corpus
    make: dict[str, Callable[[nn.Module, float], Optimizer]]  # name -> (model, lr) -> optimizer
    windows: int  # of the validation text
    evaluations: int  # per run, besides the one at its end
    width: int = WIDTH


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the share of the full learning rate at `step`: warm-up, then a straight line down to zero."""
    return min((step + 1) / WARM_UP, 1.0) * (steps - step) / steps


def train(run: Run, task: Task, on_step: Callable[[Run], object]) -> tuple[Record, CharacterModel, Optimizer]:
    """Train a new model as `run` says. Two runs with one seed see the same first weights and the same batches."""
    torch.manual_seed(run.seed)
    model = CharacterModel(task.corpus.symbols, task.width)
    optimizer = task.make[run.optimizer](model, run.lr)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, run.steps))
    batches = torch.Generator().manual_seed(run.seed)
    held_out = task.corpus.validation_windows(task.windows, CONTEXT + 1)
    record = Record(run)
    every = max(run.steps // task.evaluations, 1)
    for step in range(run.steps):
        if step % every == 0:
            evaluate(model, held_out, record)
        batch = task.corpus.batch(BATCH, CONTEXT + 1, batches)
        started = perf_counter()
        loss = loss_of(model, batch)
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
    evaluate(model, held_out, record)
    return record, model, optimizer


@torch.no_grad()
def evaluate(model: CharacterModel, windows: Tensor, record: Record) -> None:
    """Append the loss over `windows` to `record`."""
    losses = [loss_of(model, part).item() * len(part) for part in windows.split(EVALUATION_BATCH)]
    record.steps.append(len(record.train))
    record.validation.append(sum(losses) / len(windows))
    record.seconds.append((sum(record.gradient_ms) + sum(record.optimizer_ms)) / 1e3)
