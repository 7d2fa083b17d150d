"""The blocks of 8-bit momentum: neighbouring elements in the last dimension of a parameter share one scale.

So shards cut along any other dimension have whole blocks, and the elements of a block are adjacent in memory. In a
convolution, blocks run along the columns of its matrices, which `flatten` takes in memory order.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, Mapping, Optional, Sequence

from torch import Tensor

from ..kernels.formats import BLOCK, blocks_of
from .matrices import MatrixView, view_in_group


def block_axes(view: MatrixView) -> tuple[int, ...]:
    """Return the dimensions of the parameter along which blocks run: columns, or rows of views with `is_transposed`."""
    return (view.row_axis,) if view.is_transposed else view.col_axes


def in_blocks(name: str, view: MatrixView) -> MatrixView:
    """Return how the tensor of scales is seen: one scale for each block of the matrices of `view`, or of their shards.

    Raises ValueError if `split_rows` cuts a block.
    """
    if not view.is_transposed:
        return replace(view, cols=blocks_of(view.cols))
    if any(end % BLOCK for end in itertools.accumulate(view.rows[:-1])):
        raise ValueError(
            f"momentum_dtype='int8' has a scale for every {BLOCK} neighbours in the last dimension of {name}, {view}, "
            "and split_rows cuts between such neighbours: give its group another momentum_dtype"
        )
    return replace(view, rows=tuple(map(blocks_of, view.rows)))


def scales_shape(view: MatrixView, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor of scales for a parameter with `shape`; it has the same dimensions.

    If blocks run along several dimensions, the first one counts the blocks and the others have size 1.
    """
    first, *others = axes = block_axes(view)
    blocks = blocks_of(math.prod(shape[axis] for axis in axes))
    return tuple(blocks if axis == first else 1 if axis in others else size for axis, size in enumerate(shape))


def blocks_in_group(name: str, p: Tensor, group: Mapping[str, Any]) -> Optional[MatrixView]:
    """Return how the tensor of scales of `p` is seen; None if the settings of its group ask for no scales.

    Raises ValueError if the settings do not fit `p`.
    """
    return in_blocks(name, view_in_group(name, p, group)) if group["momentum_dtype"] == "int8" else None
