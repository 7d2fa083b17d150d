"""What a rank measures, made up: sharded matrices, and the product that wins on this rank, without a clock."""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.tuning.conftest import TableClock

CPU = torch.device("cpu")
TABLES = ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC")
SIZE = (24, 40)
SHARDED = Shard(0)


@contextlib.contextmanager
def measuring(kernel, fastest: str, problems=(), clock=None):
    """Let this rank measure that `fastest` is, with a cache folder of its own; yields the sizes that it measures.

    `clock` None stands still.
    """
    contest, tune, measured = kernel.tuning.contest, kernel.tuning.tune, []

    def contest_of(task):
        measured.append((task.need.m, task.need.k))
        if problems:
            raise problems[0]
        made = {name: contest.Candidate(lambda: None, partial(str, name), name) for name in TABLES}
        entry = lambda winner, times: {"m": task.need.m, "k": task.need.k, "products": winner}  # noqa: E731
        return contest.Contest(made, "NATIVE", "SINGLE", entry)

    clock = clock or TableClock({**dict.fromkeys(TABLES, 1.0), fastest: 0.5})
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=folder))
        stack.enter_context(mock.patch.object(tune, "contest_of", contest_of))
        stack.enter_context(mock.patch.object(tune, "Clock", clock))
        kernel.kernels.speeds.measurements.forget()
        yield measured


def fsdp(kernel, *sizes, placement=SHARDED):
    """Return an optimizer of matrices that all ranks share, in bfloat16, and the matrices."""
    mesh = init_device_mesh("cpu", (4,))
    params = [nn.Parameter(distribute_tensor(torch.ones(size), mesh, [placement])) for size in sizes]
    return kernel.Muon([(f"layers.{i}.w", p) for i, p in enumerate(params)], ns_dtype=torch.bfloat16), params
