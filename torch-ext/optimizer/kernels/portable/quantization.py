"""Momentum in 8 bits: codes, and a scale for each 64 neighbours in a row, as in `optimizer_common/quantize.h`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import BLOCK
from .arithmetic import number

_LARGEST = 127
_LEAST_SCALE = 2.0**-126
# A little more than the largest square of a code, 127²: a quotient may be rounded up.
_MOST = 2.0**14


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scale code |code|, in `dtype`, of codes (k, rows, cols) with scales (k, rows, ceil(cols / 64))."""
    values = codes.to(dtype)
    return _of_elements(scale, codes).to(dtype) * (values * values.abs())


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, int8 of the shape of x (k, rows, cols), and scales, float32, with the nearest values to x."""
    blocks = torch.nn.functional.pad(x.abs(), (0, -x.size(-1) % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = (blocks.amax(-1) / number(_LARGEST**2, x)).float().clamp_min(_LEAST_SCALE)
    squares = (x.abs() / _of_elements(scale, x).to(x.dtype)).float()
    roots = torch.where(squares <= _MOST, squares, 0.0).sqrt()  # 0 instead of NaN and infinity
    return (roots + 0.5).floor().copysign(x).to(torch.int8), scale


def _of_elements(scale: Tensor, like: Tensor) -> Tensor:
    return scale.repeat_interleave(BLOCK, -1)[..., : like.size(-1)]
