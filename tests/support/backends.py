"""Over what the ranks of a test talk: the same laws hold on CPUs and, where there are several, on GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.support.refusals import error_of


def on_every_backend(ranks: int = 4) -> pytest.MarkDecorator:
    """Run a test with `pools` over gloo and, where there are as many GPUs as it has ranks, over NCCL."""
    nccl = pytest.param("nccl", marks=pytest.mark.multi_gpu(ranks))
    return pytest.mark.parametrize("pools", ["gloo", nccl], indirect=True)


def error_of_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Return what a step says of all ranks, or on a GPU the reading of its result; None if it goes through."""
    return error_of(lambda: (optimizer.step(), read_last_step(optimizer)))


def read_last_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise what the next step would: on a GPU only that one reads what on a CPU the last step has raised.

    All ranks must call it.
    """
    optimizer._check_last_step()
