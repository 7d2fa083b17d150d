"""The matrices of a sharded parameter: which rows and columns of each a rank holds, and where in its local tensor."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..kernels.native import BLOCK
from ..parameters.matrices import MatrixView
from ..parameters.momentum_blocks import block_axes, scales_shape
from .layout import Layout, Runs, length, runs_of, within


class Part(NamedTuple):
    """Rows and columns of a matrix; nothing where one of them is empty."""

    rows: Runs
    cols: Runs

    @property
    def size(self) -> int:
        """The number of elements."""
        return length(self.rows) * length(self.cols)

    def origin(self) -> tuple[int, int]:
        """Return the first row and column; ValueError for a part in several blocks."""
        if len(self.rows) != 1 or len(self.cols) != 1:
            got = f"rows {self.rows} and columns {self.cols}"
            raise ValueError(f"stochastic rounding needs parts that are one block, got {got}")
        return self.rows[0][0], self.cols[0][0]


@dataclass(frozen=True)
class Shards:
    """A parameter that is seen as matrices by `view`, and lies on ranks as `layout` says.

    Those of like parameters are one object (`shards_of`), so that what a plan asks of every matrix is found once.
    """

    view: MatrixView
    layout: Layout

    def part(self, index: int, rank: int) -> Part:
        """Return what `rank` holds of the matrix at `index` of the view."""
        if not self.has_something(index, rank):
            return Part((), ())
        _, rows, cols = self._runs(rank)
        number = index % len(self.view.rows)
        start = sum(self.view.rows[:number])
        return Part(within(rows, start, start + self.view.rows[number]), cols)

    def local(self, rank: int) -> tuple[MatrixView, tuple[int, ...]]:
        """Return how the local tensor of `rank` is seen as parts of matrices, and the index of each one's matrix."""
        stack, rows, cols = self._runs(rank)
        places = [place for start, stop in stack for place in range(start, stop)]
        ends = itertools.accumulate(self.view.rows)
        counts = tuple(length(within(rows, end - count, end)) for count, end in zip(self.view.rows, ends))
        view = replace(self.view, stack=len(places), rows=counts, cols=length(cols))
        return view, tuple(place * len(counts) + part for place in places for part in range(len(counts)))

    def is_whole(self, index: int) -> bool:
        """Whether whoever has something of the matrix at `index` has all of it."""
        return self._whole[index % len(self.view.rows)]

    def lengthwise(self, index: int) -> Optional[int]:
        """Return the side, 0 for rows and 1 for columns, along which alone the matrix at `index` lies in parts.

        None for one that is whole, cut along both sides or along the shorter one.
        """
        size = self.view.shapes[index]
        sides = {int(dim != self.view.row_axis) for dim in self.layout.split_dims - {*self.view.stack_axes}}
        side = sides.pop() if len(sides) == 1 else None
        return side if side is not None and size[side] >= size[1 - side] else None

    def holders(self, index: int) -> tuple[int, ...]:
        """Return the ranks that have something of the matrix at `index`, or an empty share of an uneven split."""
        holders = self._holders_in_stack
        return self.layout.mesh.members if holders is None else holders.get(index // len(self.view.rows), ())

    def has_something(self, index: int, rank: int) -> bool:
        """Whether `rank` is one of the holders of the matrix at `index`."""
        return rank in (self.layout.mesh if self._holders_in_stack is None else self.holders(index))

    def seen_as(self, view: MatrixView) -> Shards:
        """Return the shards of a tensor that lies like the parameter, whose matrices are lines of the parameter's.

        They have one row or one column. Where a line lies in parts, the ranks that hold its beginning hold the number.
        """
        return shards_of(view, self.layout._replace(shape=view.shape_in(self.layout.shape)))

    @functools.cached_property
    def copies(self) -> int:
        """How many copies of the parameter there are."""
        return self.layout.copies

    @functools.cached_property
    def _holders_in_stack(self) -> Optional[dict[int, tuple[int, ...]]]:
        """The holders of each place in the stack; None where that is not split, and all ranks hold all places."""
        return _holders(self.layout) if self.layout.split_dims & {*self.view.stack_axes} else None

    @functools.cached_property
    def _whole(self) -> tuple[bool, ...]:
        """Of each of the parts into which rows are split, whether all of it is where something of it is."""
        dims, rows = self.layout.split_dims, self.view.row_axis
        if not dims <= {*self.view.stack_axes, rows}:
            return (False,) * len(self.view.rows)
        cuts = _cuts(self.layout, rows) if rows in dims else ()
        ends = itertools.accumulate(self.view.rows)
        return tuple(
            bisect.bisect_right(cuts, end - count) == bisect.bisect_left(cuts, end)
            for count, end in zip(self.view.rows, ends)
        )

    def _runs(self, rank: int) -> tuple[Runs, Runs, Runs]:
        """Return the positions in the stack, the rows and the columns that `rank` has."""
        runs, view = runs_of(self.layout, rank), self.view
        return self._merged(runs, view.stack_axes), runs[view.row_axis], self._merged(runs, view.col_axes)

    def _merged(self, runs: tuple[Runs, ...], axes: tuple[int, ...]) -> Runs:
        """Return the indices along `axes` taken together, of which only the first may be split (`check_shards`)."""
        if not axes:
            return ((0, 1),)
        inner = math.prod(self.layout.shape[axis] for axis in axes[1:])
        return tuple((start * inner, stop * inner) for start, stop in runs[axes[0]])


@functools.lru_cache(maxsize=256)
def shards_of(view: MatrixView, layout: Layout) -> Shards:
    """Return the shards of this view and layout, the same object each time."""
    return Shards(view, layout)


def local_rows(values: Tensor, layout: Optional[Layout], rank: int) -> Tensor:
    """Return the entries of `values`, one for each row of a whole parameter, of the rows that `rank` holds."""
    if layout is None:
        return values
    runs = runs_of(layout, rank)[0]
    return torch.cat([values[start:stop] for start, stop in runs]) if runs else values[:0]


@functools.lru_cache(maxsize=256)
def _cuts(layout: Layout, dim: int) -> tuple[int, ...]:
    """Return where in a dimension, in rising order, another rank's part begins."""
    return tuple(sorted({start for rank in layout.mesh.ranks for start, _ in runs_of(layout, rank)[dim]}))


@functools.lru_cache(maxsize=256)
def _holders(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Return the ranks, in rising order, that hold something of each place along the first dimension."""
    ranks_at: dict[int, list[int]] = {}
    for rank in layout.mesh.members:
        for start, stop in runs_of(layout, rank)[0]:
            for place in range(start, stop):
                ranks_at.setdefault(place, []).append(rank)
    return {place: tuple(ranks) for place, ranks in ranks_at.items()}


def check_blocks(name: str, view: MatrixView, layout: Layout) -> None:
    """Raise ValueError for momentum in 8 bits of a parameter that is cut within a block.

    Where parts begin between blocks, the scales are cut there, too.
    """
    first, *others = block_axes(view)
    inner = math.prod(layout.shape[axis] for axis in others)
    scales = layout._replace(shape=scales_shape(view, layout.shape))
    for rank in layout.mesh.ranks if first in layout.split_dims else ():
        runs = tuple((start * inner, stop * inner) for start, stop in runs_of(layout, rank)[first])
        wanted = tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in runs)
        cuts = [start for start, _ in runs if start % BLOCK]
        if cuts or runs_of(scales, rank)[first] != wanted:
            raise ValueError(
                f"momentum_dtype='int8' has a scale for each {BLOCK} neighbours along dimension {first} of {name} "
                f"{layout.shape}, of which rank {rank} has {runs}: shard another dimension, or so that parts begin at "
                f"multiples of {BLOCK}, or give its group another momentum_dtype"
            )


def check_shards(name: str, shards: Shards) -> None:
    """Raise ValueError for a convolution that is sharded along its kernel, or along `in` with other strides.

    Its parts would not be blocks of rows and columns.
    """
    view, dims = shards.view, shards.layout.split_dims
    if view.row_axis != 0:  # experts, whose three dimensions may all be split
        return
    contiguous = view.col_axes == tuple(sorted(view.col_axes))
    if max(dims, default=0) > 1 or (1 in dims and not contiguous):
        raise ValueError(
            f"{name}, a convolution {shards.layout.shape}, is sharded along dimensions {sorted(dims)}: "
            "Muon needs it sharded along the first, or a contiguous one along the second"
        )
