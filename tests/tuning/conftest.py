"""What tests of tuning share: a clock that is a table, contests of stand-ins on a CPU, and the CPU as a GPU."""

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


@pytest.fixture
def gpu(kernel, measurements, monkeypatch):
    """The CPU as a GPU: its key is one's, and a launch is what the kernel's stand-in for CPUs computes."""
    machine, candidates = kernel.kernels.speeds.machine, kernel.tuning.candidates
    key = machine.gpu_key("a GPU")
    for module in (kernel.tuning.tune, kernel.tuning.findings, candidates, kernel.kernels.speeds.gains):
        monkeypatch.setattr(module, "key_of", lambda device: key)
    monkeypatch.setattr(candidates, "target_of", lambda device: kernel.kernels.gpu.tuned.Target("cuda", 90))
    monkeypatch.setattr(kernel.kernels.gpu.symmetric_gemm, "launch_symmetric_gemm", Launch(kernel))
    monkeypatch.setattr(kernel.tuning.gpu_contest, "RAGGED", (33, 20))
    return key


class Launch:
    """A launch on the CPU. `wrong` says how some configurations err; `last` is the one that was launched.

    `lengths` has how many matrices were multiplied at once, by the kernel.
    """

    def __init__(self, kernel):
        self.kernel, self.wrong, self.last, self.lengths = kernel, {}, None, {}

    def __call__(self, A, B, D, C, scalars, config):
        self.last = "-".join(map(str, config))
        self.lengths.setdefault(self.kernel.tuning.gpu_contest._kernel(config), set()).update((len(A), len(C)))
        numbers = (torch.tensor(float(x)) for x in scalars)
        self.kernel.kernels.gpu.symmetric_gemm._on_cpu(A, B, D, C, *numbers)
        self.wrong.get(self.last, lambda *_: None)(A, B, C)
