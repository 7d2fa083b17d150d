"""A float32 number in two halves of 16 bits: the formula of `rules/master_weights.py`, which says what it is for."""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC0  # in bfloat16


def joined(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a bfloat16 `parameter` and its int16 `remainder`, with their shape."""
    bits = parameter.detach().view(torch.int16).to(torch.int32) << 16
    return (bits + remainder).view(torch.float32)


def halves_of(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 parameter and the int16 remainder of a float32 `master`, with its shape."""
    bits, is_nan = master.view(torch.int32), master.isnan()
    # The addition can overflow int32 only for the bits of a NaN.
    upper = ((bits + (1 << 15)) >> 16).to(torch.int16).masked_fill_(is_nan, _NAN)
    return upper.view(torch.bfloat16), bits.to(torch.int16).masked_fill_(is_nan, 0)
