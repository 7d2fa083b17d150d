"""The matrices of a sharded parameter: which rows and columns of each a rank holds, and where in its local tensor."""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import replace
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..matrices import MatrixView
from .placement import Layout, Runs, length, runs_of, within


class Part(NamedTuple):
    """Rows and columns of a matrix; nothing where one of them is empty."""

    rows: Runs
    cols: Runs

    @property
    def size(self) -> int:
        """The number of elements."""
        return length(self.rows) * length(self.cols)

    def origin(self) -> tuple[int, int]:
        """Return the first row and column; ValueError for a part that is no one block."""
        if len(self.rows) != 1 or len(self.cols) != 1:
            given = f"rows {self.rows} and columns {self.cols}"
            raise ValueError(f"stochastic rounding needs parts that are one block, got {given}")
        return self.rows[0][0], self.cols[0][0]


class Shards(NamedTuple):
    """A parameter that is seen as matrices by `view`, and lies on ranks as `layout` says."""

    view: MatrixView
    layout: Layout

    def part(self, index: int, rank: int) -> Part:
        """Return what `rank` holds of the matrix at `index` of the view."""
        stack, rows, cols = self._held(rank)
        which, number = divmod(index, len(self.view.rows))
        if not within(stack, which, which + 1):
            return Part((), ())
        start = sum(self.view.rows[:number])
        return Part(within(rows, start, start + self.view.rows[number]), cols)

    def local(self, rank: int) -> tuple[MatrixView, tuple[int, ...]]:
        """Return how the local tensor of `rank` is seen as parts of matrices, and the index of each one's matrix."""
        stack, rows, cols = self._held(rank)
        held = [number for start, stop in stack for number in range(start, stop)]
        counts, first = [], 0
        for count in self.view.rows:
            counts.append(length(within(rows, first, first + count)))
            first += count
        own = replace(self.view, stack=len(held), rows=tuple(counts), cols=length(cols))
        return own, tuple(number * len(counts) + part for number in held for part in range(len(counts)))

    def is_whole(self, index: int) -> bool:
        """Whether whoever has something of the matrix at `index` has all of it."""
        stack, rows = (0, 1) if self.view.kind == "experts" else (None, 0)
        dims = {split[0] for split in self.layout.splits if split is not None}
        if not dims <= {stack, rows}:
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
        size, first = self.view.shapes[index], 1 if self.view.kind == "experts" else 0
        sides = {split[0] - first for split in self.layout.splits if split is not None and split[0] >= first}
        side = sides.pop() if len(sides) == 1 else None
        return side if side is not None and size[side] >= size[1 - side] else None

    def holders(self, index: int) -> tuple[int, ...]:
        """Return the ranks that have something of the matrix at `index`, or might have but for an uneven split."""
        if self.view.kind != "experts":
            return self.layout.mesh.members
        return _holders(self.layout).get(index // len(self.view.rows), ())

    def _held(self, rank: int) -> tuple[Runs, Runs, Runs]:
        """Return the positions in the stack, the rows and the columns that `rank` holds."""
        runs = runs_of(self.layout, rank)
        if self.view.kind == "matrix":
            return ((0, 1),), runs[0], runs[1]
        if self.view.kind == "experts":
            return runs
        kernel = math.prod(self.layout.shape[2:])
        if self.view.kind == "batched":
            return ((0, kernel),), runs[0], runs[1]
        return ((0, 1),), runs[0], tuple((start * kernel, stop * kernel) for start, stop in runs[1])


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
    found: dict[int, list[int]] = {}
    for rank in layout.mesh.members:
        for start, stop in runs_of(layout, rank)[0]:
            for place in range(start, stop):
                found.setdefault(place, []).append(rank)
    return {place: tuple(ranks) for place, ranks in found.items()}


class Sheet(NamedTuple):
    """How this rank sees a parameter: the matrices of the whole, and the parts of them in its local tensor."""

    whole: MatrixView
    shards: Optional[Shards]  # None for a parameter of this process alone
    local: MatrixView
    indices: tuple[int, ...]  # which of the whole's matrices each of the local ones is a part of


def sheet_of(name: str, view: MatrixView, layout: Optional[Layout], rank: int) -> Sheet:
    """Return how `rank` sees a parameter of this view and layout, None for one of its own; errors: `check_shards`."""
    if layout is None:
        return Sheet(view, None, view, tuple(range(len(view.shapes))))
    shards = Shards(view, layout)
    check_shards(name, shards)
    return Sheet(view, shards, *shards.local(rank))


def check_shards(name: str, shards: Shards) -> None:
    """Raise ValueError for a convolution that is sharded along its kernel, or along `in` with other strides.

    Its parts would be no blocks of rows and columns.
    """
    if shards.view.kind not in ("flatten", "batched"):
        return
    dims = {split[0] for split in shards.layout.splits if split is not None}
    contiguous = shards.view.order == tuple(sorted(shards.view.order))
    if max(dims, default=0) > 1 or (1 in dims and not contiguous):
        raise ValueError(
            f"{name}, a convolution {shards.layout.shape}, is sharded along dimensions {sorted(dims)}: "
            "Muon needs it sharded along the first, or a contiguous one along the second"
        )
