"""What AdamW and NAdamW have in common: the settings of a group, the tensors of a parameter, steps that overflow."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor


class FallbackRule(NamedTuple):
    """The settings of one group; lr and weight_decay, which `scaled_decay` has returned, are numbers or 0-d tensors."""

    lr: Union[float, Tensor]
    betas: tuple[float, float]
    eps: float
    weight_decay: Union[float, Tensor]
    maximize: bool
    decay_mode: str = "decoupled"


class FallbackTensors(NamedTuple):
    """Parameters, their gradients, the averages of gradients and of their squares, and float32 0-d counts of steps."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


def uncount_overflow_(steps: Sequence[Tensor], found_inf: Optional[Tensor]) -> None:
    """Take the step just counted off `steps`, 0-d tensors, in place, where gradients overflowed: it changed nothing."""
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.to(step.device).reshape(()) for step in steps])
