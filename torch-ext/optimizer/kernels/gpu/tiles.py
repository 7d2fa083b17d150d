"""Tiles of a lower triangle, for Triton kernels: which one a program computes, what it reads, and how it stores it."""

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


@triton.jit
def load_panel(panel, matrix, row, start, K_INNER: tl.constexpr, TILE: tl.constexpr, TILE_K: tl.constexpr):
    """Load (TILE, TILE_K) of a panel (b, m, k). If m is contiguous, the descriptor is of the transpose."""
    if K_INNER:
        return panel.load([matrix, row, start]).reshape(TILE, TILE_K)
    return panel.load([matrix, start, row]).reshape(TILE_K, TILE).T


@triton.jit
def store_tile(tile, C, i, j, m, TILE: tl.constexpr):
    """Store the square tile (i, j), i >= j, of a matrix C (pointer, strides) with m rows, and its mirror image.

    On the diagonal the lower triangle is stored: operands that only commute give two roundings of one value.
    """
    rows, cols = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    wide_rows, wide_cols = rows.to(tl.int64), cols.to(tl.int64)
    mask = (rows < m)[:, None] & (cols < m)[None, :]
    if i == j:
        tile = tl.where(rows[:, None] >= cols[None, :], tile, tl.trans(tile))
    else:  # pointers on every device: C may have strides that no descriptor can describe
        tl.store(C[0] + wide_rows[:, None] * C[2] + wide_cols[None, :] * C[1], tile, mask=mask)
    tl.store(C[0] + wide_rows[:, None] * C[1] + wide_cols[None, :] * C[2], tile, mask=mask)
