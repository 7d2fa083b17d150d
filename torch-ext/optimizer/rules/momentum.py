"""Momentum: gradients in, one packed batch of directions out, in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.native import momentum_pack_
from .scaling import UNSCALED, GradientScaling


class MomentumRule(NamedTuple):
    """buffer <- beta * buffer + (1 - beta) * gradient; the direction is the buffer, or looks one step ahead of it."""

    beta: float
    nesterov: bool
    maximize: bool


def pack_momentum_(
    buffers: Sequence[Tensor],
    gradients: Sequence[Tensor],
    packed: Tensor,
    rule: MomentumRule,
    scaling: GradientScaling = UNSCALED,
    offsets: Optional[Sequence[int]] = None,
) -> None:
    """Update `buffers` in place and write each matrix's direction into `packed`; gradients are not changed.

    `buffers` and `gradients` are B matrices (m, n), `packed` is (B, m, n), all of any strides; each list has one
    dtype. With `offsets`, a place for each, `packed` has one dimension and matrices may differ in shape. With Nesterov
    the direction is beta * buffer + (1 - beta) * gradient of the new buffer. Gradients that overflowed leave the
    buffers alone and give zeros.
    Source: Sutskever et al., On the importance of initialization and momentum in deep learning (2013), as an average.
    """
    momentum_pack_(buffers, gradients, packed, *rule, **scaling._asdict(), offsets=offsets)
    torch.autograd.graph.increment_version([*buffers, packed])
