"""Descent: a packed batch of directions into parameters, in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple, Sequence, Union

import torch
from torch import Tensor

from ..kernels.native import descend_

Number = Union[float, Tensor]


class DescentRule(NamedTuple):
    """parameter <- parameter * (1 - lr * weight_decay) - lr * multiplier * direction; both are 0-d tensors."""

    lr: Tensor
    weight_decay: Tensor


def descent_rule(lr: Number, weight_decay: Number) -> DescentRule:
    """Return the rule of a group's settings, once for all its batches; a tensor is read by the kernels where it is."""
    return DescentRule(_as_tensor(lr), _as_tensor(weight_decay))


def descend_packed_(parameters: Sequence[Tensor], directions: Tensor, multiplier: float, rule: DescentRule) -> None:
    """Update `parameters`, B matrices (m, n), in place by `directions` (B, m, n), rounding each element once.

    Weight decay is decoupled, of the group's learning rate and not of the matrix's multiplier.
    Source: Loshchilov, Hutter, Decoupled weight decay regularization, arXiv:1711.05101.
    """
    descend_(parameters, directions, rule.lr, rule.weight_decay, _as_tensor(multiplier))
    # So that autograd refuses a backward pass through the old values, as it does after torch's own updates.
    torch.autograd.graph.increment_version(parameters)


def _as_tensor(value: Number) -> Tensor:
    # float64 on the CPU: the value arrives exactly, and the kernels read it without a copy to the device.
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
