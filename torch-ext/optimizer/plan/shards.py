"""The matrices of a sharded parameter: which rows and columns of each a rank holds, and where in its local tensor."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from dataclasses import replace
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..parameters.matrices import MatrixView
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


class Shards(NamedTuple):
    """A parameter that is seen as matrices by `view`, and lies on ranks as `layout` says."""

    view: MatrixView
    layout: Layout

    def part(self, index: int, rank: int) -> Part:
        """Return what `rank` holds of the matrix at `index` of the view."""
        stack, rows, cols = self._runs(rank)
        which, number = divmod(index, len(self.view.rows))
        if not within(stack, which, which + 1):
            return Part((), ())
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
        dims, rows = self.layout.split_dims, self.view.row_axis
        if not dims <= {*self.view.stack_axes, rows}:
            return False
        if rows not in dims:
            return True
        number = index % len(self.view.rows)
        start = sum(self.view.rows[:number])
        cuts = _cuts(self.layout, rows)
        return bisect.bisect_right(cuts, start) == bisect.bisect_left(cuts, start + self.view.rows[number])

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
        if not self.layout.split_dims & {*self.view.stack_axes}:
            return self.layout.mesh.members
        return _holders(self.layout).get(index // len(self.view.rows), ())

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
