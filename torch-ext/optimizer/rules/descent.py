"""Descent: a packed batch of directions into parameters, in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..kernels.native import descend_
from .decay import DECAY_MODES, Number, on_device, scaled_decay
from .master_weights import joined, split_

# What may be rounded stochastically.
HALVES = (torch.float16, torch.bfloat16)


class DescentOptions(NamedTuple):
    """Optional inputs of a descent, for each matrix: row scales, seeds, masks, and where its update lies in a buffer.

    `row_scale`, float32 with an entry for each row of all matrices, multiplies the result; `seeds`, B int64, round
    half-precision parameters stochastically; where `found_inf` is not 0, or `active`, B bool, is not set, nothing
    changes; `offsets` are the places of the updates in a buffer of one dimension; `origins` tell for each matrix, as
    a part of a larger one, its first row and column there and that one's columns, so that seeds round it as the whole;
    `remainder`, B int16 matrices, has what bfloat16 parameters lack of float32 masters, and changes with them.
    """

    row_scale: Optional[Tensor] = None
    seeds: Optional[Tensor] = None
    found_inf: Optional[Tensor] = None
    active: Optional[Tensor] = None
    offsets: Optional[Sequence[int]] = None
    origins: Optional[Sequence[int]] = None
    remainder: Optional[Sequence[Tensor]] = None


PLAIN = DescentOptions()


class DescentRule(NamedTuple):
    """parameter <- parameter * keep - lr * multiplier * direction; lr and weight_decay of all matrices, or of each.

    weight_decay is scaled already (`rules/decay.py`, which says what keep is).
    """

    lr: Tensor
    weight_decay: Tensor
    decay_mode: str = "decoupled"
    multiplier: Number = 1.0


def descent_rule(
    lr: Sequence[Number], weight_decay: Sequence[Number], decay_mode: str, decay_lr: Sequence[Optional[float]]
) -> DescentRule:
    """Return the rule of one or B learning rates and decays; a tensor is read by the kernels where it is."""
    decays = [scaled_decay(decay_mode, *of_one) for of_one in zip(lr, weight_decay, decay_lr)]
    return DescentRule(_together(lr), _together(decays), "decoupled" if decay_mode == "corrected" else decay_mode)


def descend_packed_(
    parameters: Sequence[Tensor], directions: Tensor, rule: DescentRule, options: DescentOptions = PLAIN
) -> None:
    """Update `parameters`, B matrices (m, n), in place by `directions` (B, m, n), rounding each element once.

    With remainders, which change too, both have together the bits of float32 parameters (`rules/master_weights.py`).
    Weight decay is of the group's learning rate and not of the matrix's multiplier.
    """
    mode, multiplier = DECAY_MODES.index(rule.decay_mode), as_tensor(rule.multiplier)
    descend_(parameters, directions, rule.lr, rule.weight_decay, multiplier, mode, **options._asdict())
    # So that autograd refuses a backward pass through the old values, as it does after torch's own updates.
    torch.autograd.graph.increment_version([*parameters, *(options.remainder or ())])


def scale_rows_(
    p: Tensor, row_scale: Tensor, remainder: Optional[Tensor] = None, unless: Sequence[Optional[Tensor]] = ()
) -> None:
    """Multiply each row of `p` by its float32 factor, in place, with one rounding; a bias has one element a row.

    With a `remainder`, which changes too, the float32 master is scaled. Nothing changes where one of `unless`, tensors
    of one element, is not 0.
    """
    for reason in unless:
        row_scale = row_scale if reason is None else row_scale.where(reason == 0, 1)
    row_scale = row_scale.reshape(-1, *[1] * (p.ndim - 1))
    if remainder is None:
        p.copy_(p * row_scale)
    else:
        split_(p, remainder, joined(p, remainder) * row_scale)


def _together(values: Sequence[Number]) -> Tensor:
    if len(values) == 1:
        return as_tensor(values[0])
    if any(isinstance(value, Tensor) for value in values):
        device = next(value.device for value in values if isinstance(value, Tensor))
        return torch.stack([on_device(value, device) for value in values])
    return as_tensor(values)


def as_tensor(value: Union[Number, Sequence[float]]) -> Tensor:
    """Return numbers in float64 on the CPU, exactly, where the kernels read them without a copy; a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
