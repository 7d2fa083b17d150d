"""`move_blocks_`: copies blocks between matrices and a flat buffer, such as a message.

    matrices[position + i, top + r, left + c] = buffer[offset + i step + r row_step + c]
                                      for all i < count, r < rows, c < cols; with `to_buffer` the reverse copy

`matrices` is (B, m, n) of any strides, each size below 2^31, and `buffer` 1-D, contiguous and of the same dtype:
float32, float64, float16 or bfloat16. `blocks` (N, 9) is int64, contiguous, always on the CPU, and read at the call.
Each row has the fields of `plan.blocks.Block` in their order: count, position, top, left, rows, cols, offset, step,
row_step.

- Bits are copied, so a NaN keeps its payload. Elements that no block covers keep their bits; empty blocks do nothing.
- No number is negative. Blocks lie within the matrices, and those that are not empty within the buffer. For a
  compiled op all of them together have fewer than 2^31 tiles of up to 4096 elements.
- Blocks that write one element twice are not detected: it gets one of the values, not always the same.
- On a GPU a launch takes 640 blocks by value, so no table is copied to the device or kept there.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from .memory import Memory
from .refusals import check_like, name_of, place, shown

SCHEMA = "(Tensor(a!) matrices, Tensor(b!) buffer, Tensor blocks, bool to_buffer) -> ()"

_FIELDS = 9
_MOST = 2**31 - 1


def move_blocks_(matrices: Tensor, buffer: Tensor, blocks: Tensor, to_buffer: bool) -> None:
    """Copy blocks from matrices (B, m, n) to a flat buffer, or back."""
    _check_tensors(matrices, buffer, blocks)
    _check_memory(matrices, buffer, blocks, to_buffer)
    table = blocks.tolist()
    for i, block in enumerate(table):
        _check_block(i, block, matrices, buffer)
    views = [_views(block, matrices, buffer, to_buffer) for block in table if not _is_empty(block)]
    if views:
        inside, outside = map(list, zip(*views))
        torch._foreach_copy_(*((outside, inside) if to_buffer else (inside, outside)))


def _views(block: Sequence[int], matrices: Tensor, buffer: Tensor, to_buffer: bool) -> tuple[Tensor, Tensor]:
    """Return a block's elements (count, rows, cols) in the matrices and in the buffer."""
    count, position, top, left, rows, cols, offset, step, row_step = block
    if to_buffer and step == 0:  # torch refuses to write an element twice: the last matrix stays
        position, count = position + count - 1, 1
    if to_buffer and row_step == 0:
        top, rows = top + rows - 1, 1
    inside = matrices[position : position + count, top : top + rows, left : left + cols]
    return inside, buffer.as_strided((count, rows, cols), (step, row_step, 1), buffer.storage_offset() + offset)


def _is_empty(block: Sequence[int]) -> bool:
    count, _, _, _, rows, cols, *_ = block
    return 0 in (count, rows, cols)


def _check_tensors(matrices: Tensor, buffer: Tensor, blocks: Tensor) -> None:
    check_like("buffer", buffer, buffer)
    check_like("matrices", matrices, buffer)
    if matrices.dtype != buffer.dtype:
        dtypes = f"{name_of(matrices.dtype)} and {name_of(buffer.dtype)}"
        raise RuntimeError(f"matrices and buffer must have one dtype, got {dtypes}")
    if matrices.ndim != 3 or max(matrices.shape) > _MOST:
        raise RuntimeError(f"matrices must be (B, rows, cols), each less than 2^31, got {shown(matrices.shape)}")
    if buffer.ndim != 1 or not buffer.is_contiguous():
        raise RuntimeError(f"buffer must be contiguous and 1-D, got shape {_layout(buffer)}")
    if not blocks.is_cpu or blocks.dtype != torch.int64:
        raise RuntimeError(f"blocks must be Long on the CPU, got {name_of(blocks.dtype)} on {place(blocks)}")
    if blocks.ndim != 2 or blocks.size(1) != _FIELDS or not blocks.is_contiguous():
        raise RuntimeError(f"blocks must be (N, {_FIELDS}), contiguous, got shape {_layout(blocks)}")


def _layout(t: Tensor) -> str:
    return f"{shown(t.shape)} with strides {shown(t.stride())}"


def _check_memory(matrices: Tensor, buffer: Tensor, blocks: Tensor, to_buffer: bool) -> None:
    memory = Memory()
    memory.read("blocks", blocks)
    for name, t, written in ("buffer", buffer, to_buffer), ("matrices", matrices, not to_buffer):
        memory.write(name, t) if written else memory.read(name, t)
    memory.check()


def _check_block(i: int, block: Sequence[int], matrices: Tensor, buffer: Tensor) -> None:
    text = f"blocks[{i}] = {shown(block)}"
    if min(block) < 0:
        raise RuntimeError(f"{text} must not be negative")
    count, position, top, left, rows, cols, offset, step, row_step = block
    ends = position + count, top + rows, left + cols
    if any(end > size for end, size in zip(ends, matrices.shape)):
        raise RuntimeError(f"{text} is not within matrices of shape {shown(matrices.shape)}")
    end = offset + (count - 1) * step + (rows - 1) * row_step + cols
    if not _is_empty(block) and end > buffer.numel():
        raise RuntimeError(f"{text} is not within a buffer of {buffer.numel()} elements")
