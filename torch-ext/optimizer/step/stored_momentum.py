"""Momentum from floating point into 8 bits and back, where the settings or a file ask for another than there is."""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor

from ..parameters.matrices import MatrixView
from ..parameters.state import BUFFER, SCALE, StateTensor
from ..plan.layout import local_part, memory_beside
from ..rules.momentum import dequantized, quantized


def convert_momentum_(
    state: dict[str, Tensor], name: str, p: Tensor, view: MatrixView, wanted: Mapping[str, StateTensor]
) -> None:
    """Bring momentum in `state` of `p`, which `view` sees as matrices, into the form that is wanted, if it is another.

    Forms are 8 bits and floating point, among whose dtypes it keeps the one that it has. Raises ValueError for codes
    without scales.
    """
    buffer, in_codes = state.get(BUFFER), SCALE in wanted
    if buffer is None:
        return
    if buffer.dtype == torch.int8 and SCALE not in state:
        raise ValueError(f"state {BUFFER} of {name} is in 8 bits, and its {SCALE} is missing")
    if in_codes and buffer.dtype != torch.int8:
        codes, scale = quantized(_lines(buffer, view.block_axes))
        state[SCALE] = memory_beside(p, wanted[SCALE].shape, torch.float32)
        state[BUFFER] = torch.empty_like(buffer, dtype=torch.int8)
        _fill_(state[BUFFER], codes, view.block_axes)
        _fill_(state[SCALE], scale, view.block_axes)
    elif not in_codes and buffer.dtype == torch.int8:
        lines = (_lines(each, view.block_axes).to(buffer.device) for each in (buffer, state.pop(SCALE)))
        state[BUFFER] = torch.empty_like(buffer, dtype=wanted[BUFFER].dtype)
        _fill_(state[BUFFER], dequantized(*lines, wanted[BUFFER].dtype), view.block_axes)


def _lines(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return this process's part of a tensor as a matrix whose rows are its elements along `axes`."""
    permuted = _permuted(tensor, axes)
    return permuted.flatten(permuted.ndim - len(axes)).flatten(0, -2)


def _fill_(tensor: Tensor, lines: Tensor, axes: Sequence[int]) -> None:
    """Write `lines` to where `_lines` reads them, on whichever device."""
    permuted = _permuted(tensor, axes)
    permuted.copy_(lines.view(permuted.shape))


def _permuted(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    others = [axis for axis in range(tensor.ndim) if axis not in axes]
    return local_part(tensor).permute(*others, *axes)
