"""A parameter of any rank seen as matrices: convolutions, stacks of experts, weights that are several in one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor

from .sequences import is_sequence

CONV_MODES = ("flatten", "batched")
_CONVOLUTION = re.compile(r"conv(?!er|ex|ey)")  # not `converter`


@dataclass(frozen=True)
class MatrixView:
    """The matrices of one parameter; `matrices` cuts tensors of its shape into them.

    There are `stack` alike (experts, or positions of a kernel; else one), and each is cut along its rows into parts
    of `rows` rows, which are matrices of their own. Rows are the dimension of outputs: of weights (in, out) the last.
    """

    stack_axes: tuple[int, ...]  # dimensions of the tensor that count the stack, () for a single matrix
    row_axis: int
    col_axes: tuple[int, ...]  # several where they are flattened, from the slowest in memory to the fastest
    stack: int
    rows: tuple[int, ...]
    cols: int
    scale: float = 1.0  # of the step multiplier of every one of the matrices

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each matrix, in the order of `matrices`: the parts of the first, then of the next."""
        return tuple((rows, self.cols) for rows in self.rows) * self.stack

    @property
    def is_plain(self) -> bool:
        """Whether the tensor itself is the one matrix."""
        return not self.stack_axes and not self.turned and len(self.rows) == len(self.col_axes) == 1

    @property
    def turned(self) -> bool:
        """Whether the rows are the last dimension."""
        return self.row_axis > self.col_axes[0]

    def matrices(self, tensor: Tensor, read_only: bool = False) -> list[Tensor]:
        """Return the matrices of `tensor`: the parameter, its momentum buffer or its gradient.

        They are views, whose changes are the tensor's. The columns of `flatten` come in the order in which the
        parameter has them in memory, other for `channels_last` than for contiguous ones: permuted columns permute
        those of a polar factor, so that updates differ by no more than the order of summation. A tensor laid out in
        another way than the parameter raises ValueError, or is copied where the caller does not write: `read_only`.
        """
        whole = [tensor]
        for unbound, axis in enumerate(self.stack_axes):  # each one unbound moves the next a place to the front
            whole = [M for stack in whole for M in stack.unbind(axis - unbound)]
        if len(self.col_axes) > 1:
            whole = [self._flat(tensor, read_only)]
        elif self.turned:
            whole = [M.mT for M in whole]
        return whole if len(self.rows) == 1 else [part for M in whole for part in M.split(self.rows)]

    def shape_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor with these matrices: `shape`, with size 1 where they have but one row or column.

        `shape` is that of the parameter, whose dimensions the tensor has.
        """
        lines = (self.row_axis,) if sum(self.rows) == 1 else ()
        lines += self.col_axes if self.cols == 1 else ()
        return tuple(1 if axis in lines else size for axis, size in enumerate(shape))

    def row_values(self, values: Tensor) -> list[Tensor]:
        """Return, for each matrix, the entries of `values` of its rows; `values` has one for each row of a whole."""
        return [*values.split(self.rows)] * self.stack

    def __str__(self) -> str:
        shape = f"{sum(self.rows)}x{self.cols}"
        text = f"flatten {shape}" if len(self.col_axes) > 1 else shape
        if self.stack_axes:
            text = f"{self.stack} matrices {shape}"
        text = f"{text} transposed" if self.turned else text
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
    experts: bool = False,
    split_rows: Optional[Sequence[int]] = None,
) -> MatrixView:
    """Return how `p`, of at least two dimensions, is seen as matrices; it depends on its shape and layout alone.

    Two dimensions are a matrix (rows, cols). With `experts` (E, rows, cols) are E of them (`is_stack`). Others are
    convolutions (out, in, *kernel): with `conv_mode` `flatten` a matrix (out, in * positions), with `batched` one
    (out, in) for each position of the kernel, whose steps `normalize_spatial` divides by sqrt(positions).
    `split_rows` are the row counts of the parts of each matrix, such as queries, keys and values.

    Raises ValueError for row counts of another sum, experts of another rank, or a layout that no view flattens.
    Source: timm, https://github.com/huggingface/pytorch-image-models, timm/optim/muon.py (convolutions).
    """
    if conv_mode not in CONV_MODES:
        raise ValueError(f"conv_mode must be one of {', '.join(CONV_MODES)}, got {conv_mode!r}")
    shape = tuple(p.shape)
    if experts and len(shape) > 3:
        raise ValueError(f"the weights of experts must be (experts, rows, cols), {name} is {shape}")
    stack_axes, row_axis, col_axes = (), 0, (1,)
    if len(shape) > 2 and experts:
        stack_axes, row_axis, col_axes = (0,), 1, (2,)
    elif len(shape) > 2 and conv_mode == "flatten":
        # Dimensions of size 1, whose strides mean nothing, stay apart from the rest wherever they end up.
        col_axes = tuple(sorted(range(1, p.ndim), key=p.stride, reverse=True))
    elif len(shape) > 2:
        stack_axes = tuple(range(2, len(shape)))
    stack, cols = (math.prod(shape[axis] for axis in axes) for axes in (stack_axes, col_axes))
    spatial = stack_axes and row_axis == 0  # the positions of a kernel
    scale = stack**-0.5 if spatial and normalize_spatial else 1.0
    rows = _parts(name, shape[row_axis], split_rows)
    view = MatrixView(stack_axes, row_axis, col_axes, stack, rows, cols, scale)
    if len(col_axes) == 1:
        return view
    try:
        # Of its strides alone: a sharded parameter is cut where its local tensor is.
        view.matrices(torch.empty_strided(p.shape, p.stride(), device="meta"))
    except ValueError as error:
        raise ValueError(f"{name} must be contiguous or channels_last for conv_mode='flatten': {error}") from None
    return view


def transposed_view(
    name: str, p: Tensor, *, experts: bool = False, split_rows: Optional[Sequence[int]] = None
) -> MatrixView:
    """Return how weights (in, out), as of transformers' `Conv1D`, or those of experts (E, in, out) are seen.

    The matrices are (out, in), and `split_rows` cuts their rows. Raises ValueError for other shapes and other sums.
    """
    if p.ndim > 2 and not experts:
        raise ValueError(f"transposed=True is of matrices (in, out) and stacks of them, {name} is {tuple(p.shape)}")
    view = matrix_view(name, p, experts=experts)
    rows, axes = _parts(name, view.cols, split_rows), (view.row_axis, *view.col_axes)
    return replace(view, row_axis=axes[1], col_axes=axes[:1], rows=rows, cols=view.rows[0])


def is_stack(name: str, ndim: int, expert_keys: Sequence[str], stacked: Optional[bool] = None) -> Optional[bool]:
    """Return whether a parameter of this name is a stack of matrices, and no convolution; None where nothing tells.

    `stacked` says it, where it is not None, of more than two dimensions. Else the name does, by its innermost
    component that tells: one of `expert_keys`, such as `experts`, or some components in a row, for a stack; `conv` in
    it for a convolution. With a number behind it, `experts.0`, such a key names the module of one expert. Four
    dimensions are a convolution unless the name says stack, which has three.
    """
    if ndim < 3 or stacked is not None:
        return ndim > 2 and bool(stacked)
    dotted = f".{name}."
    keys = [match for key in expert_keys for match in re.finditer(rf"\.{re.escape(key)}\.(?!\d+\.)", dotted)]
    stack = max((match.end() for match in keys), default=-1)
    convolution = max((match.start() for match in _CONVOLUTION.finditer(dotted.lower())), default=-1)
    if stack > convolution:
        return True if ndim == 3 else None
    return False if convolution >= 0 or ndim > 3 else None


def view_in_group(name: str, p: Tensor, group: Mapping[str, Any]) -> MatrixView:
    """Return how `p` is seen as matrices by the settings of its group; ValueError where it cannot be."""
    stack = is_stack(name, p.ndim, group["expert_keys"], group["stacked"])
    if stack is None:
        raise ValueError(
            f"Muon was asked for {name} {tuple(p.shape)}, which may be a stack of matrices or a convolution: write "
            "stacked=True or stacked=False, in its group or for all, or name stacks by expert_keys"
        )
    if group["transposed"]:
        return transposed_view(name, p, experts=stack, split_rows=group["split_rows"])
    settings = {key: group[key] for key in ("conv_mode", "normalize_spatial", "split_rows")}
    return matrix_view(name, p, experts=stack, **settings)


def moments_in_group(name: str, p: Tensor, group: Mapping[str, Any]) -> Optional[MatrixView]:
    """Return how the tensor that has the second moments of `p` is seen: as a row or a column for each of its matrices.

    It has the dimensions of `p`, of size 1 where moments are of whole lines (`MatrixView.shape_in`). None where the
    settings of its group ask for none. Raises ValueError where they cannot be seen so.
    """
    by = group["second_moment"]
    if by == "none":
        return None
    view = view_in_group(name, p, group)
    if by == "rows" or view.cols <= min(view.rows):
        return replace(view, cols=1)
    if len(view.rows) > 1:
        raise ValueError(
            f"second_moment='long_side' of {name}, {view}, asks for one number a column, and its parts of "
            f"{min(view.rows)} rows share {view.cols} columns: write second_moment='rows' in its group"
        )
    return replace(view, rows=(1,))


def plain_split_rows(split_rows: Optional[Sequence[int]]) -> Optional[tuple[int, ...]]:
    """Return row counts as a tuple of ints, None for None; TypeError or ValueError for what are none."""
    if split_rows is None:
        return None
    if not is_sequence(split_rows) or not all(isinstance(count, Integral) for count in split_rows):
        raise TypeError(f"split_rows must be whole numbers of rows, got {split_rows!r}")
    if not split_rows or min(split_rows) < 1 or any(isinstance(count, bool) for count in split_rows):
        raise ValueError(f"split_rows must be numbers of rows of at least 1, got {split_rows!r}")
    return tuple(int(count) for count in split_rows)


def _parts(name: str, rows: int, split_rows: Optional[Sequence[int]]) -> tuple[int, ...]:
    """Return into which row counts the `rows` of a matrix are split; ValueError where they do not sum to them."""
    parts = plain_split_rows(split_rows) or (rows,)
    if sum(parts) != rows:
        raise ValueError(f"split_rows of {name} must sum to its {rows} rows, {_sum(parts)} gives {sum(parts)}")
    return parts


def _sum(parts: Sequence[int]) -> str:
    """Return row counts as a sum, `4*(12+8)` for many that repeat."""
    for length in range(1, len(parts) // 4 + 1):
        times, rest = divmod(len(parts), length)
        if not rest and tuple(parts) == tuple(parts[:length]) * times:
            return f"{times}*{parts[0]}" if length == 1 else f"{times}*({'+'.join(map(str, parts[:length]))})"
    return "+".join(map(str, parts))
