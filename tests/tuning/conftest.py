"""What tests of tuning share: a clock that is a table, and contests of stand-ins on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

CPU, BF16 = torch.device("cpu"), torch.bfloat16
TABLES = ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC")
EVEN = dict.fromkeys(TABLES, 1.0)


class TableClock:
    """A clock on which work takes what a table says by its name; each measurement moves it on.

    The name is what `name_of` returns for the work: by default what the work itself does.
    """

    def __init__(
        self,
        table: Mapping[str, list[float] | float],
        per_burst: float = 0.0,
        name_of: Callable[[Callable[[], Any]], str] = lambda work: work(),
    ):
        self.table = {name: seconds if isinstance(seconds, list) else [seconds] for name, seconds in table.items()}
        self.per_burst, self.name_of = per_burst, name_of
        self.time = 0.0
        self.bursts: list[str] = []

    def __call__(self, device):
        return self

    def now(self) -> float:
        return self.time

    def ready(self, work):
        work()
        return work

    def seconds_of(self, work, times: int) -> float:
        name = self.name_of(work)
        self.bursts.append(name)
        turn = self.bursts.count(name) - 1
        self.time += self.per_burst
        return times * self.table[name][turn % len(self.table[name])]


@pytest.fixture
def table_clock():
    return TableClock


@pytest.fixture
def tune(kernel, measurements):
    """The module, with a store that knows nothing."""
    return kernel.tuning.tune


@pytest.fixture
def contests(kernel, tune, monkeypatch):
    """Contests of stand-ins, each of which returns its name; `problems` are what their proofs find, or do."""
    problems: dict[str, Exception | Callable[[], None]] = {}

    def prove(name):
        problem = problems.get(name)
        if callable(problem):
            problem()
        elif problem is not None:
            raise problem

    def contest_of(task):
        contest = kernel.tuning.contest
        made = {name: contest.Candidate(partial(prove, name), lambda name=name: name, name) for name in TABLES}
        entry = lambda winner, times: {"m": task.need.m, "k": task.need.k, "products": winner}  # noqa: E731
        return contest.Contest(made, "NATIVE", "SINGLE", entry)

    monkeypatch.setattr(tune, "contest_of", contest_of)
    return problems


def tasks(kernel, *sizes):
    return [task for m, k in sizes for task in kernel.tuning.contest.tasks_of(CPU, BF16, (m, k), 1)]


def chosen(kernel, m, k):
    return kernel.kernels.products.select_products(CPU, BF16, m, k)


def run(tuner, tune, todo) -> list[str]:
    return [*(stage() for stage in tune.stages_of(tuner, todo)), tuner.summary()]
