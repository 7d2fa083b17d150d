"""What AdamW and NAdamW share: the settings of a group, the tensors of a parameter, and overflowed steps."""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, NamedTuple, Optional, Sequence, TypeVar, Union

import torch
from torch import Tensor

from .scaling import GradientScaling

Row = TypeVar("Row", bound=tuple)


class FallbackRule(NamedTuple):
    """Settings of one group. lr and weight_decay are numbers or 0-d tensors; `scaled_decay` has computed the latter."""

    lr: Union[float, Tensor]
    betas: tuple[float, float]
    eps: float
    weight_decay: Union[float, Tensor]
    maximize: bool
    decay_mode: str = "decoupled"


class FallbackTensors(NamedTuple):
    """Parameters, gradients, averages of gradients and of squared gradients, and float32 0-d step counts."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


def columns_of(rows: Iterable[Sequence[Tensor]]) -> FallbackTensors:
    """Return rows, each with the tensors of one parameter, as lists."""
    return FallbackTensors(*map(list, zip(*rows)))


def runs_of(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    """Yield rows in runs whose first tensors have at most `most` elements together, larger ones alone."""
    run: list[Row] = []
    elements = 0
    for row in rows:
        count = row[0].numel()
        if run and elements + count > most:
            yield run
            run, elements = [], 0
        run.append(row)
        elements += count
    yield run


# What takes one step of AdamW or NAdamW.
FallbackUpdate = Callable[[FallbackTensors, FallbackRule, GradientScaling], None]


def uncount_overflow_(steps: Sequence[Tensor], found_inf: Optional[Tensor]) -> None:
    """Subtract 1 from `steps`, 0-d tensors, in place, if gradients overflowed: the counted step changed nothing."""
    if found_inf is not None:
        overflow = found_inf.reshape(())
        torch._foreach_sub_(steps, [overflow.to(step.device) for step in steps])
