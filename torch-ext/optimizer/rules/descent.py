"""Descent: a packed batch of directions into parameters, in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple, Sequence, Union

import torch
from torch import Tensor

from ..kernels.native import descend_

Number = Union[float, Tensor]


class DescentRule(NamedTuple):
    """parameter <- parameter * (1 - lr * weight_decay) - lr * multiplier * direction; lr is a number or 0-d tensor."""

    lr: Number
    weight_decay: Number
    multiplier: float


def descend_packed_(parameters: Sequence[Tensor], directions: Tensor, rule: DescentRule) -> None:
    """Update `parameters`, B matrices (m, n), in place by `directions` (B, m, n), rounding each element once.

    Weight decay is decoupled, of the group's learning rate and not of the matrix's multiplier.
    Source: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101.
    """
    descend_(parameters, directions, *(_as_tensor(value) for value in rule))


def _as_tensor(value: Number) -> Tensor:
    # float64 on the CPU: the value arrives exactly, and the kernels read it without a copy to the device.
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
