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
from torch.distributed.tensor import DTensor

from ..kernels.formats import BLOCK, blocks_of
from ..parameters.matrices import MatrixView
from ..parameters.momentum_blocks import block_axes, scales_shape
from .layout import Layout, layout_of, local_part, memory_beside, runs_of
from .process_groups import this_rank
from .runs import Runs, length, within


class Part(NamedTuple):
    """Rows and columns of a matrix. The part is empty if there are no rows or no columns."""

    rows: Runs
    cols: Runs

    @property
    def size(self) -> int:
        """The number of elements."""
        return length(self.rows) * length(self.cols)

    def origin(self, name: str) -> tuple[int, int]:
        """Return the first row and column. Raises ValueError for a part that is not one block, of parameter `name`."""
        if len(self.rows) != 1 or len(self.cols) != 1:
            got = f"rows {self.rows} and columns {self.cols}"
            raise ValueError(
                f"stochastic rounding needs parts that are one block, and this rank has {got} of {name}: shard it "
                "otherwise, or set stochastic_rounding=False in its group"
            )
        return self.rows[0][0], self.cols[0][0]


@dataclass(frozen=True)
class Shards:
    """The matrices of a parameter, as its `view` defines them, on ranks, as its `layout` says.

    Parameters with equal view and layout share one object (`shards_of`), so what a plan asks about it is cached.
    """

    view: MatrixView
    layout: Layout

    def part(self, index: int, rank: int) -> Part:
        """Return the rows and columns that `rank` holds of the matrix at `index` of the view."""
        if not self.has_something(index, rank):
            return Part((), ())
        _, rows, cols = self._runs(rank)
        return Part(within(rows, *self._bounds[index % len(self.view.rows)]), cols)

    def largest_part(self, index: int) -> int:
        """Return at least as many elements as any rank holds of the matrix at `index`.

        Each cut makes the first piece of a dimension the longest, and the first rank has only first pieces: of 9 rows
        on 8 ranks it has 2. All of its rows may be of other matrices.
        """
        _, rows, cols = self._runs(self.layout.mesh.ranks[0])
        return min(length(rows), self.view.rows[index % len(self.view.rows)]) * length(cols)

    def local(self, rank: int) -> tuple[MatrixView, tuple[int, ...]]:
        """Return a view of the local tensor of `rank` as parts of matrices, and the index of each part's matrix."""
        stack, rows, cols = self._runs(rank)
        stacked = [index for start, stop in stack for index in range(start, stop)]
        counts = tuple(length(within(rows, start, end)) for start, end in self._bounds)
        view = replace(self.view, stack=len(stacked), rows=counts, cols=length(cols))
        return view, tuple(index * len(counts) + part for index in stacked for part in range(len(counts)))

    def is_whole(self, index: int) -> bool:
        """Whether each rank that has something of the matrix at `index` has all of it."""
        return self._whole[index % len(self.view.rows)]

    def lengthwise(self, index: int) -> Optional[int]:
        """Return the side along which the matrix at `index` is cut, unless it is the shorter one: 0 is rows, 1 columns.

        None for a matrix that is whole, or is cut along both sides or the shorter one. A square has no shorter side.
        """
        size = self.view.shapes[index]
        sides = {int(dim != self.view.row_axis) for dim in self.layout.split_dims - {*self.view.stack_axes}}
        side = sides.pop() if len(sides) == 1 else None
        return side if side is not None and size[side] >= size[1 - side] else None

    def holders(self, index: int) -> tuple[int, ...]:
        """Return the ranks that have a part of the matrix at `index`. A part may be empty if the split is uneven."""
        if self._holders_in_stack is None:
            return self.layout.mesh.members
        at_one_index = len(self.view.rows) * self._inner(self.view.stack_axes)
        return self._holders_in_stack[index // at_one_index]

    def has_something(self, index: int, rank: int) -> bool:
        """Whether `rank` is one of the holders of the matrix at `index`."""
        return rank in (self.layout.mesh if self._holders_in_stack is None else self.holders(index))

    def seen_as(self, view: MatrixView) -> Shards:
        """Return the shards of a tensor that is laid out like the parameter, and has one number for each row or column.

        Its matrices have one row or one column. If a row of the parameter is cut, the ranks that hold its beginning
        hold its number.
        """
        return shards_of(view, self.layout._replace(shape=view.shape_in(self.layout.shape)))

    @functools.cached_property
    def copies(self) -> int:
        """How many copies of the parameter there are."""
        return self.layout.copies

    @functools.cached_property
    def _bounds(self) -> tuple[tuple[int, int], ...]:
        """For each of the matrices into which rows are split: its first row, and the one behind its last."""
        ends = (0, *itertools.accumulate(self.view.rows))
        return tuple(zip(ends, ends[1:]))

    @functools.cached_property
    def _holders_in_stack(self) -> Optional[dict[int, tuple[int, ...]]]:
        """The holders of each index of a stack's first dimension; None if all ranks hold all of it."""
        return _holders(self.layout) if self.layout.split_dims & {*self.view.stack_axes} else None

    @functools.cached_property
    def _whole(self) -> tuple[bool, ...]:
        """For each of the matrices into which rows are split: whether a rank that has some of it has all of it."""
        dims, rows = self.layout.split_dims, self.view.row_axis
        if not dims <= {*self.view.stack_axes, rows}:
            return (False,) * len(self.view.rows)
        cuts = _cuts(self.layout, rows) if rows in dims else ()
        return tuple(bisect.bisect_right(cuts, start) == bisect.bisect_left(cuts, end) for start, end in self._bounds)

    def _runs(self, rank: int) -> tuple[Runs, Runs, Runs]:
        """Return the positions in the stack, the rows and the columns that `rank` holds."""
        runs, view = runs_of(self.layout, rank), self.view
        return self._merged(runs, view.stack_axes), runs[view.row_axis], self._merged(runs, view.col_axes)

    def _merged(self, runs: tuple[Runs, ...], axes: tuple[int, ...]) -> Runs:
        """Return the indices along `axes`, flattened. Only the first of them may be split (`check_shards`)."""
        if not axes:
            return ((0, 1),)
        inner = self._inner(axes)
        return tuple((start * inner, stop * inner) for start, stop in runs[axes[0]])

    def _inner(self, axes: tuple[int, ...]) -> int:
        """Return the size of one index along the first of `axes`."""
        return math.prod(self.layout.shape[axis] for axis in axes[1:])


@functools.lru_cache(maxsize=256)
def shards_of(view: MatrixView, layout: Layout) -> Shards:
    """Return the shards of a view and layout, the same object each time while it is among the last 256."""
    return Shards(view, layout)


def local_rows(values: Tensor, layout: Optional[Layout], rank: int) -> Tensor:
    """Return the entries of `values` for the rows that `rank` holds. `values` has one entry per row of the whole."""
    if layout is None:
        return values
    runs = runs_of(layout, rank)[0]
    return torch.cat([values[start:stop] for start, stop in runs]) if runs else values[:0]


def is_whole(value: Tensor, p: Tensor) -> bool:
    """Whether `p` is a DTensor and `value`, which belongs to it, is none: then each rank takes its part of `value`."""
    return isinstance(p, DTensor) and not isinstance(value, DTensor)


def part_of_whole(whole: Tensor, p: Tensor) -> Tensor:
    """Return this rank's part of `whole` in memory beside the DTensor `p`, which has as many dimensions.

    Nothing is sent: every rank has the whole.
    """
    memory = memory_beside(p, whole.shape, whole.dtype)
    for dim, runs in enumerate(runs_of(layout_of("", memory), this_rank())):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in runs or ((0, 0),)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    if whole.numel():  # the empty part of a rank that is not in the mesh may have one dimension
        local_part(memory).copy_(whole.detach())
    return memory


@functools.lru_cache(maxsize=256)
def _cuts(layout: Layout, dim: int) -> tuple[int, ...]:
    """Return the indices of a dimension at which any rank's part begins, in ascending order."""
    return tuple(sorted({start for rank in layout.mesh.ranks for start, _ in runs_of(layout, rank)[dim]}))


@functools.lru_cache(maxsize=256)
def _holders(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Return the ranks, in ascending order, that hold a part of each index of the first dimension."""
    ranks_at: dict[int, list[int]] = {}
    for rank in layout.mesh.members:
        for start, stop in runs_of(layout, rank)[0]:
            for index in range(start, stop):
                ranks_at.setdefault(index, []).append(rank)
    return {index: tuple(ranks) for index, ranks in ranks_at.items()}


def check_blocks(name: str, view: MatrixView, layout: Layout) -> None:
    """Raise ValueError if shards cut a block of 8-bit momentum.

    Parts must begin between blocks, and the scales must be cut at the same places. If a part began inside of a block,
    that block's scale would be wanted twice: by that part, and by the one before.
    """
    first, *others = block_axes(view)
    inner = math.prod(layout.shape[axis] for axis in others)
    scales = layout._replace(shape=scales_shape(view, layout.shape))
    for rank in layout.mesh.ranks if first in layout.split_dims else ():
        runs = tuple((start * inner, stop * inner) for start, stop in runs_of(layout, rank)[first])
        wanted = tuple((start // BLOCK, blocks_of(stop)) for start, stop in runs)
        if runs_of(scales, rank)[first] != wanted:
            parts = " and ".join(f"{start} to {stop - 1}" for start, stop in runs)
            raise ValueError(
                f"momentum_dtype='int8' has a scale for each {BLOCK} neighbours along dimension {first} of {name} "
                f"{layout.shape}, of which rank {rank} has {parts}: shard another dimension, or so that parts begin at "
                f"multiples of {BLOCK}, or give its group another momentum_dtype"
            )


def check_shards(name: str, shards: Shards) -> None:
    """Raise ValueError for convolutions whose parts would not be blocks of rows and columns, and for stacks in stacks.

    That is a convolution sharded along its kernel dimensions, or along `in` while its memory order is not contiguous,
    and a stack sharded along another of its dimensions than the first.
    """
    view, dims = shards.view, shards.layout.split_dims
    if view.row_axis != 0:  # no convolution, but a stack or a transposed matrix, whose rows and columns may be split
        inner = dims & {*view.stack_axes[1:]}
        if inner:
            raise ValueError(
                f"{name}, a stack of matrices {shards.layout.shape}, is sharded along dimension {min(inner)}: shard "
                "the first dimension, or rows or columns"
            )
        return
    contiguous = view.col_axes == tuple(sorted(view.col_axes))
    if max(dims, default=0) > 1 or (1 in dims and not contiguous):
        raise ValueError(
            f"{name}, a convolution {shards.layout.shape}, is sharded along dimensions {sorted(dims)}: "
            "Muon needs it sharded along the first, or a contiguous one along the second"
        )
