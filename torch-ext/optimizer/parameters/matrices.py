"""How a parameter is seen as matrices: convolutions, stacks of experts, fused weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor

CONV_MODES = ("flatten", "batched")
# The default of `expert_keys`.
EXPERT_KEYS = ("experts",)
_CONVOLUTION = re.compile(r"conv(?!er|ex|ey)")  # not `converter`


@dataclass(frozen=True)
class MatrixView:
    """The matrices of one parameter; `matrices` cuts tensors of its shape into them.

    There are `stack` matrices of one shape (experts, or positions of a kernel; else one). Each is cut along its rows
    into parts of `rows` rows, which are orthogonalized separately. Rows are the output dimension: the last one of
    weights (in, out).
    """

    stack_axes: tuple[int, ...]  # dimensions of the tensor that count the stack, () for a single matrix
    row_axis: int
    col_axes: tuple[int, ...]  # several if they are flattened, from the slowest in memory to the fastest
    stack: int
    rows: tuple[int, ...]
    cols: int
    scale: float = 1.0  # factor of the step multiplier of each matrix

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each matrix in the order of `matrices`: all parts of the first one, then of the next."""
        return tuple((rows, self.cols) for rows in self.rows) * self.stack

    @property
    def is_plain(self) -> bool:
        """Whether the tensor itself is the only matrix."""
        return not self.stack_axes and not self.is_transposed and len(self.rows) == len(self.col_axes) == 1

    @property
    def is_transposed(self) -> bool:
        """Whether the rows are the last dimension."""
        return self.row_axis > self.col_axes[0]

    def matrices(self, tensor: Tensor, read_only: bool = False) -> list[Tensor]:
        """Return the matrices of `tensor`: the parameter, its momentum buffer or its gradient.

        They are views that share its memory. With `flatten`, columns come in the parameter's order in memory, so
        `channels_last` differs from contiguous: permuting columns permutes the columns of the polar factor, so updates
        differ only by the order of summation. A tensor with another memory layout than the parameter raises ValueError,
        or is copied if the caller only reads it (`read_only`).
        """
        whole = [tensor]
        for unbound, axis in enumerate(self.stack_axes):  # unbinding one axis moves the later ones to the front
            whole = [M for stack in whole for M in stack.unbind(axis - unbound)]
        if len(self.col_axes) > 1:
            whole = [self._flat(tensor, read_only)]
        elif self.is_transposed:
            whole = [M.mT for M in whole]
        return whole if len(self.rows) == 1 else [part for M in whole for part in M.split(self.rows)]

    def shape_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return `shape`, the parameter's, with size 1 along the rows or columns if matrices have only one of them."""
        lines = (self.row_axis,) if sum(self.rows) == 1 else ()
        lines += self.col_axes if self.cols == 1 else ()
        return tuple(1 if axis in lines else size for axis, size in enumerate(shape))

    def row_values(self, values: Tensor) -> list[Tensor]:
        """Return the entries of `values` for the rows of each matrix; `values` has one per row of an uncut matrix."""
        return [*values.split(self.rows)] * self.stack

    def __str__(self) -> str:
        shape = f"{sum(self.rows)}x{self.cols}"
        text = f"flatten {shape}" if len(self.col_axes) > 1 else shape
        if self.stack_axes:
            text = f"{self.stack} matrices {shape}"
        text = f"{text} transposed" if self.is_transposed else text
        return text if len(self.rows) == 1 else f"{text} split {_sum(self.rows)}"

    def _flat(self, tensor: Tensor, read_only: bool) -> Tensor:
        order, shape = (self.row_axis, *self.col_axes), (sum(self.rows), self.cols)
        permuted = tensor.permute(order)
        if read_only:
            return permuted.reshape(shape)
        try:
            return permuted.view(shape)
        except RuntimeError:
            raise ValueError(
                f"a tensor {tuple(tensor.shape)} with strides {tensor.stride()} cannot be seen as one matrix "
                f"{shape[0]} x {shape[1]} with its dimensions in the order {order}"
            ) from None


def matrix_view(
    name: str,
    p: Tensor,
    *,
    conv_mode: str = "flatten",
    normalize_spatial: bool = True,
    stacked: bool = False,
    split_rows: Optional[Sequence[int]] = None,
) -> MatrixView:
    """Return how `p`, which has at least two dimensions, is seen as matrices; only its shape and layout are used.

    Two dimensions are one matrix (rows, cols). With `stacked`, (E, rows, cols) are E matrices (`is_stack`), and
    (E, 2, rows, cols) are 2 E. Others are convolutions (out, in, *kernel): with `conv_mode` `flatten` one matrix
    (out, in * positions), with `batched` one (out, in) for each position of the kernel, whose updates
    `normalize_spatial` divides by sqrt(positions).
    `split_rows` are the row counts of the parts of each matrix, such as queries, keys and values.

    Raises ValueError if row counts have another sum, or no view flattens the layout.
    Source: timm, https://github.com/huggingface/pytorch-image-models, timm/optim/muon.py (convolutions).
    """
    shape = tuple(p.shape)
    stack_axes, row_axis, col_axes = (), 0, (1,)
    if len(shape) > 2 and stacked:
        *stack_axes, row_axis, last = range(len(shape))
        stack_axes, col_axes = tuple(stack_axes), (last,)
    elif len(shape) > 2 and conv_mode == "flatten":
        col_axes = _columns_in_memory(p)
    elif len(shape) > 2:
        stack_axes = tuple(range(2, len(shape)))
    stack, cols = (math.prod(shape[axis] for axis in axes) for axes in (stack_axes, col_axes))
    spatial = stack_axes and row_axis == 0  # the positions of a kernel
    scale = stack**-0.5 if spatial and normalize_spatial else 1.0
    rows = _parts(name, shape[row_axis], split_rows)
    view = MatrixView(stack_axes, row_axis, col_axes, stack, rows, cols, scale)
    if len(col_axes) == 1:
        return view
    here = part_here(p)
    view_here = replace(view, rows=here.shape[:1], cols=here.shape[1:].numel())
    try:
        view_here.matrices(torch.empty_strided(here.shape, here.stride(), device="meta"))
    except ValueError as error:
        raise ValueError(f"{name} must be contiguous or channels_last for conv_mode='flatten': {error}") from None
    return view


def part_here(p: Tensor) -> Tensor:
    """Return the part of `p` in this process's memory; `p` itself unless it is a DTensor with a part here.

    Its strides say how elements lie: `distribute_tensor` makes contiguous parts of a tensor with other strides.
    """
    part = getattr(p, "_local_tensor", p)  # of a DTensor, which only higher floors know; outside of its mesh it is 1-d
    return part if part.ndim == p.ndim else p


def _columns_in_memory(p: Tensor) -> tuple[int, ...]:
    """Return the dimensions behind the first, the slowest in memory first; a stride along size 1 means nothing."""
    axes, here = tuple(range(1, p.ndim)), part_here(p)
    steps = list(zip(here.stride(), here.shape))  # of equal strides, that along a size of 1 here comes last
    long = sorted((axis for axis in axes if p.shape[axis] > 1), key=steps.__getitem__, reverse=True)
    return axes if long == sorted(long) else (*long, *(axis for axis in axes if p.shape[axis] <= 1))


def transposed_view(
    name: str, p: Tensor, *, stacked: bool = False, split_rows: Optional[Sequence[int]] = None
) -> MatrixView:
    """Return how weights (in, out), as in transformers' `Conv1D`, or experts (E, in, out) are seen as matrices.

    The matrices are (out, in), and `split_rows` cuts their rows. Raises ValueError for other shapes and other sums.
    """
    if p.ndim > 2 and not stacked:
        raise ValueError(f"transposed=True is for matrices (in, out) and stacks of them, {name} is {tuple(p.shape)}")
    view = matrix_view(name, p, stacked=stacked)
    rows, axes = _parts(name, view.cols, split_rows), (view.row_axis, *view.col_axes)
    return replace(view, row_axis=axes[1], col_axes=axes[:1], rows=rows, cols=view.rows[0])


def is_stack(name: str, ndim: int, expert_keys: Sequence[str], stacked: Optional[bool] = None) -> Optional[bool]:
    """Return whether a parameter is a stack of matrices, not a convolution; None if neither shape nor name shows it.

    `stacked` decides if it is not None. Otherwise the innermost telling component of the name decides: one of
    `expert_keys`, such as `experts` (a key may span several components), means a stack, and `conv` in a component
    means a convolution. A key before a number, as in `experts.0`, names a single expert and does not count. Four and
    more dimensions are a convolution without such a component. With an expert key they are a stack if they are a
    parameter of that module itself, such as `experts.w13`; `experts.up.weight` may be a layer's, so the answer is None.
    """
    if ndim < 3 or stacked is not None:
        return ndim > 2 and bool(stacked)
    dotted = f".{name}."
    keys = [match for key in expert_keys for match in re.finditer(rf"\.{re.escape(key)}\.(?!\d+\.)", dotted)]
    stack = max((match.end() for match in keys), default=-1)
    convolution = max((match.start() for match in _CONVOLUTION.finditer(dotted.lower())), default=-1)
    if stack > convolution:
        inside = dotted[stack:-1]
        return True if ndim == 3 or ("." not in inside and inside != "weight") else None
    return False if convolution >= 0 or ndim > 3 else None


def view_in_group(name: str, p: Tensor, group: Mapping[str, Any]) -> MatrixView:
    """Return how `p` is seen as matrices with the settings of its group; ValueError if they do not fit."""
    stack = is_stack(name, p.ndim, group["expert_keys"], group["stacked"])
    if stack is None:
        raise ValueError(
            f"Muon was asked for {name} {tuple(p.shape)}, which may be a stack (experts, rows, cols) or a convolution: "
            "write stacked=True or stacked=False, or name stacks by expert_keys; for position tables, use_muon=False"
        )
    if group["transposed"]:
        return transposed_view(name, p, stacked=stack, split_rows=group["split_rows"])
    settings = {key: group[key] for key in ("conv_mode", "normalize_spatial", "split_rows")}
    return matrix_view(name, p, stacked=stack, **settings)


def moments_in_group(name: str, p: Tensor, group: Mapping[str, Any]) -> Optional[MatrixView]:
    """Return how the tensor of second moments of `p` is seen: as one row or one column for each of its matrices.

    It has the dimensions of `p`, with size 1 along the lines that share a moment (`MatrixView.shape_in`). None if the
    settings of its group ask for no second moments. Raises ValueError if they do not fit.
    """
    by = group["second_moment"]
    if by == "none":
        return None
    view = view_in_group(name, p, group)
    if by == "rows" or view.cols <= min(view.rows):
        return replace(view, cols=1)
    if len(view.rows) > 1:
        raise ValueError(
            f"second_moment='long_side' of {name}, {view}, needs one number per column, but its parts of "
            f"{min(view.rows)} rows share {view.cols} columns: write second_moment='rows' in its group"
        )
    return replace(view, rows=(1,))


def _parts(name: str, rows: int, split_rows: Optional[Sequence[int]]) -> tuple[int, ...]:
    """Return the row counts into which `rows` are split; ValueError if they do not sum to `rows`."""
    parts = (rows,) if split_rows is None else tuple(map(int, split_rows))
    if sum(parts) != rows:
        raise ValueError(f"split_rows of {name} must sum to its {rows} rows, {_sum(parts)} gives {sum(parts)}")
    return parts


def _sum(parts: Sequence[int]) -> str:
    """Return row counts as a sum, such as `4*(12+8)` if many repeat."""
    for length in range(1, len(parts) // 4 + 1):
        times, rest = divmod(len(parts), length)
        if not rest and tuple(parts) == tuple(parts[:length]) * times:
            return f"{times}*{parts[0]}" if length == 1 else f"{times}*({'+'.join(map(str, parts[:length]))})"
    return "+".join(map(str, parts))
