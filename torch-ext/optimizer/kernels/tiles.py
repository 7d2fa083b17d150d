"""Which tile of a lower triangle a program computes, for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lower_triangle(index):
    """Return row and column (i, j), i >= j, of entry number `index` when a lower triangle is numbered row by row.

    The square root is computed in float32 and is off by less than one row. The two corrections are exact as long as
    their products fit into 31 bits, up to row 46,338.
    """
    i = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= index, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > index, i - 1, i)
    return i, index - i * (i + 1) // 2


@triton.jit
def grouped_lower_triangle(index, side, GROUP: tl.constexpr):
    """Return row and column (i, j), i >= j, of tile number `index` in a triangle walked in groups of GROUP rows.

    Inside a group the walk goes column by column, so programs that run at the same time share panels of their operands.
    """
    i, _ = lower_triangle(index)
    first = i // GROUP * GROUP  # a group starts with the same index as its first row has in the walk row by row
    rows = tl.minimum(side - first, GROUP)
    inside = index - first * (first + 1) // 2
    corner = inside - first * rows  # negative in the rectangle to the left of the group's triangle
    p, q = lower_triangle(tl.maximum(corner, 0))
    i = first + tl.where(corner < 0, inside % rows, p)
    j = tl.where(corner < 0, inside // rows, first + q)
    return i, j
