"""Momentum: gradients in, one packed batch of directions out, in one pass over memory."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.native import BLOCK, momentum_pack_
from .scaling import UNSCALED, GradientScaling


class MomentumRule(NamedTuple):
    """buffer <- beta * buffer + (1 - beta) * gradient; the direction is the buffer, or looks one step ahead of it."""

    beta: float
    nesterov: bool
    maximize: bool


class MomentumBuffers(NamedTuple):
    """Momentum of B matrices (m, n): values, or codes of 8 bits with the scales of their blocks."""

    values: Sequence[Tensor]
    scales: Optional[Sequence[Tensor]] = None

    @property
    def tensors(self) -> list[Tensor]:
        """The values of all matrices, and then their scales."""
        return [*self.values, *(self.scales or ())]

    def tensors_of(self, i: int) -> list[Tensor]:
        """Return what the matrix at `i` has."""
        return [each[i] for each in self if each is not None]


def pack_momentum_(
    buffers: MomentumBuffers,
    gradients: Sequence[Tensor],
    packed: Tensor,
    rule: MomentumRule,
    scaling: GradientScaling = UNSCALED,
    offsets: Optional[Sequence[int]] = None,
) -> None:
    """Update `buffers` in place and write each matrix's direction into `packed`; gradients are not changed.

    `buffers` and `gradients` are of B matrices (m, n), `packed` is (B, m, n), all of any strides; each list has one
    dtype. With `offsets`, a place for each, `packed` has one dimension and matrices may differ in shape. With Nesterov
    the direction is beta * buffer + (1 - beta) * gradient of the new buffer. Gradients that overflowed leave the
    buffers alone and give zeros.
    Source: Sutskever et al., On the importance of initialization and momentum in deep learning (2013), as an average.
    """
    values, scales = buffers
    momentum_pack_(values, gradients, packed, *rule, **scaling._asdict(), offsets=offsets, momentum_scale=scales)
    torch.autograd.graph.increment_version([*buffers.tensors, packed])


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix (m, n) in 8 bits: codes (m, n), int8, and the scales of their blocks, float32.

    Those are (m, ceil(n / BLOCK)); `kernels/native.py` says what is lost.
    """
    rows, cols = values.shape
    codes = torch.zeros_like(values, dtype=torch.int8)
    scale = torch.zeros(rows, -(-cols // BLOCK), device=values.device)
    packed = values.new_empty(1, rows, cols)
    momentum_pack_([codes], [values], packed, 0.0, False, momentum_scale=[scale])
    return codes, scale


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `codes` (m, n) with their scales stand for, rounded to `dtype`; both are left as they are."""
    packed = torch.empty(1, *codes.shape, dtype=dtype, device=codes.device)
    nothing = torch.zeros_like(packed[0])
    momentum_pack_([codes.clone()], [nothing], packed, 1.0, False, momentum_scale=[scale.clone()])
    return packed[0]
