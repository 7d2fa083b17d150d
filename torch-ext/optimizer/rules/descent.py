"""Descent: applies a packed batch of updates to parameters, in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..kernels.master_weights import joined, split_
from ..kernels.native import descend_
from .decay import DECAY_MODES, Number, on_device

_CPU = torch.device("cpu")


class DescentOptions(NamedTuple):
    """Optional inputs of a descent.

    row_scale: float32, an entry for each row of all matrices; it multiplies the result.
    seeds: B int64; half-precision parameters are rounded stochastically.
    found_inf, active: nothing changes if found_inf is not 0; a matrix does not change if its entry of active, B bool,
        is False.
    offsets: where each update begins in a 1-D buffer.
    origins: for each matrix that is a part of a larger one, its first row and column there, and the number of columns
        of the whole; `seeds` then round the part as they would round the whole.
    remainder: B int16 matrices, the lower halves of float32 masters, which change together with bfloat16 parameters.
    norms: (B,), in `exact_dtype`; it receives the norm of every update, also of inactive ones.
    """

    row_scale: Optional[Tensor] = None
    seeds: Optional[Tensor] = None
    found_inf: Optional[Tensor] = None
    active: Optional[Tensor] = None
    offsets: Optional[Sequence[int]] = None
    origins: Optional[Sequence[int]] = None
    remainder: Optional[Sequence[Tensor]] = None
    norms: Optional[Tensor] = None


PLAIN = DescentOptions()


class DescentRule(NamedTuple):
    """parameter <- parameter * keep - lr * multiplier * update; one lr and weight_decay, or one for each matrix.

    weight_decay has gone through `scaled_decay`. `rules/decay.py` says what keep is.
    """

    lr: Tensor
    weight_decay: Tensor
    decay_mode: str = "decoupled"
    multiplier: Number = 1.0


def descent_rule(lr: Sequence[Number], weight_decay: Sequence[Number], decay_mode: str) -> DescentRule:
    """Return the rule for one or for B learning rates and decays. Kernels read tensors on their device."""
    mode = "decoupled" if decay_mode == "corrected" else decay_mode
    return DescentRule(_together(lr), _together(weight_decay), mode)


def descend_packed_(
    parameters: Sequence[Tensor], updates: Tensor, rule: DescentRule, options: DescentOptions = PLAIN
) -> None:
    """Update `parameters`, B matrices (m, n), in place by `updates` (B, m, n), rounding each element once.

    Remainders change, too. Together with the parameters they have the bits that float32 parameters would have
    (`kernels/master_weights.py`). Weight decay uses the group's learning rate without the matrix's multiplier.
    """
    mode, multiplier = DECAY_MODES.index(rule.decay_mode), as_tensor(rule.multiplier)
    # Each argument that is left out saves the dispatcher some work.
    passed_on = {name: value for name, value in zip(options._fields, options) if value is not None}
    descend_(parameters, updates, rule.lr, rule.weight_decay, multiplier, mode, **passed_on)
    # Makes autograd refuse a backward pass through the old values, as after torch's own updates.
    torch.autograd.graph.increment_version([*parameters, *(options.remainder or ())])


def scale_rows_(p: Tensor, row_scale: Tensor, remainder: Optional[Tensor], unless: Sequence[Optional[Tensor]]) -> None:
    """Multiply each row of `p` by its float32 factor, in place, with one rounding. A bias counts as one element a row.

    With a `remainder`, which changes, too, the float32 master is scaled. If one of the one-element tensors `unless` is
    not 0, nothing changes.
    """
    for reason in unless:
        row_scale = row_scale if reason is None else row_scale.where(reason == 0, 1)
    row_scale = row_scale.reshape(-1, *[1] * (p.ndim - 1))
    if remainder is None:
        # A product in half precision would give a NaN other bits, and copies on other ranks might keep theirs.
        p.copy_(torch.where(row_scale == 1, p, (p * row_scale).to(p.dtype)))
    else:
        split_(p, remainder, joined(p, remainder) * row_scale)


def _together(values: Sequence[Number]) -> Tensor:
    """Return one number, or one for each matrix, in a tensor that kernels read without waiting."""
    if len(values) == 1:
        return as_tensor(values[0])
    devices = [value.device for value in values if isinstance(value, Tensor)]
    if devices:
        device = next((each for each in devices if each != _CPU), _CPU)  # else the host would wait for a GPU
        return torch.stack([on_device(value, device) for value in values])
    return as_tensor(values)


def as_tensor(value: Union[Number, Sequence[float]]) -> Tensor:
    """Return numbers as a float64 tensor on the CPU, which kernels read without a copy; a tensor as it is."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (int, float)):
        return torch.scalar_tensor(value, dtype=torch.float64, device=_CPU)  # in a third of `torch.tensor`'s time
    return torch.tensor(value, dtype=torch.float64, device=_CPU)
