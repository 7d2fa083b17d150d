"""Momentum: turns gradients into one packed batch of directions, in one pass over memory."""

from __future__ import annotations

from functools import reduce
from operator import attrgetter
from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.formats import blocks_of
from ..kernels.native import momentum_pack_
from .scaling import GradientScaling


class MomentumRule(NamedTuple):
    """buffer <- beta * buffer + (1 - beta) * gradient; the direction is the buffer, or looks one step ahead."""

    beta: float
    nesterov: bool
    maximize: bool


class MomentumBuffers(NamedTuple):
    """Momentum of B matrices (m, n): values, or 8-bit codes with the scales of their blocks."""

    values: Sequence[Tensor]
    scales: Optional[Sequence[Tensor]] = None

    def tensors_of(self, i: int) -> list[Tensor]:
        """Return the tensors of the matrix at `i`: its values, and its scales if there are any."""
        return [each[i] for each in self if each is not None]


class Directions(NamedTuple):
    """Memory for the directions of B matrices: `packed` (B, m, n) of any strides.

    With `offsets`, a place for each matrix, it is 1-D and matrices may differ in shape. Otherwise `norms` (B,), in
    `exact_dtype`, may be given for the directions' Frobenius norms, unless `packed` is float64.
    """

    packed: Tensor
    offsets: Optional[Sequence[int]] = None
    norms: Optional[Tensor] = None


def pack_momentum_(
    buffers: MomentumBuffers,
    gradients: Sequence[Tensor],
    directions: Directions,
    rule: MomentumRule,
    scaling: GradientScaling,
) -> None:
    """Update `buffers` in place and write each matrix's direction into `directions`; gradients are not changed.

    `buffers` and `gradients` are lists of B matrices (m, n) of any strides; buffers have one dtype. With Nesterov the
    direction is beta * buffer + (1 - beta) * gradient of the new buffer. Gradients that overflowed leave the buffers
    unchanged and give zeros. Source: Sutskever et al., On the importance of initialization and momentum in deep
    learning (2013), as an average.
    """
    (values, scales), (packed, offsets, norms) = buffers, directions
    optional = ("offsets", offsets), ("momentum_scale", scales), ("norms", norms), *zip(scaling._fields, scaling)
    passed_on = {name: value for name, value in optional if value is not None}
    momentum_pack_(values, _in_one_dtype(gradients), packed, *rule, **passed_on)


def _in_one_dtype(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return gradients as the kernel reads them. Those of several dtypes are widened, so that none loses a bit."""
    dtypes = set(map(attrgetter("dtype"), gradients))
    if len(dtypes) == 1:
        return gradients
    widest = reduce(torch.promote_types, dtypes)
    return [gradient.to(widest) for gradient in gradients]


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix (m, n) in 8 bits: int8 codes (m, n), and float32 scales (m, ceil(n / BLOCK)) of their blocks.

    `kernels/portable/momentum_pack.py` says how much is lost.
    """
    rows, cols = values.shape
    codes = torch.zeros_like(values, dtype=torch.int8)
    scale = torch.zeros(rows, blocks_of(cols), dtype=torch.float32, device=values.device)
    packed = values.new_empty(1, rows, cols)
    momentum_pack_([codes], [values], packed, 0.0, False, momentum_scale=[scale])
    return codes, scale


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `codes` (m, n) and their scales, rounded to `dtype`; the arguments are not changed."""
    packed = torch.empty(1, *codes.shape, dtype=dtype, device=codes.device)
    nothing = torch.zeros_like(packed[0])
    momentum_pack_([codes.clone()], [nothing], packed, 1.0, False, momentum_scale=[scale.clone()])
    return packed[0]
