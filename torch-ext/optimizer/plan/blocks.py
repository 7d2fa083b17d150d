"""Blocks: where parts of matrices are in a buffer and in a batch, as strides and offsets that a step only applies."""

from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple, Optional

from .runs import length
from .shards import Part


class Block(NamedTuple):
    """The same rows x cols of `count` consecutive matrices in a batch, which are evenly spaced in a buffer.

    For example, a rank sends rows 4 to 7 of three 8 x 2 matrices. Then count is 3, position in the batch 0, top 4, left
    0, rows 4, cols 2. In the buffer they start at offset 0, 8 elements from one matrix to the next, 2 from one row to
    the next; flags follow behind.
    """

    count: int
    position: int  # of the first matrix in the batch
    top: int
    left: int
    rows: int
    cols: int
    offset: int  # in the buffer
    step: int  # elements from one matrix to the next in the buffer
    row_step: int


def blocks_of(parts: Iterable[tuple[int, Part, int]]) -> tuple[Block, ...]:
    """Return the blocks of parts, each with the position of its matrix in a batch and its offset in a buffer.

    Consecutive parts of the same shape become one block, so that a step copies them in one call.
    """
    blocks: list[Block] = []
    for position, part, offset in parts:
        for block in _runs(part, position, offset):
            joined = _joined(blocks[-1], block) if blocks else None
            blocks[-1:] = [joined] if joined else [*blocks[-1:], block]
    return tuple(blocks)


def _runs(part: Part, position: int, offset: int) -> Iterator[Block]:
    """Yield a block for each run of rows and columns of a part."""
    width, row = length(part.cols), 0
    for top, bottom in part.rows:
        col = 0
        for left, right in part.cols:
            begin = offset + row * width + col
            yield Block(1, position, top, left, bottom - top, right - left, begin, part.size, width)
            col += right - left
        row += bottom - top


def _joined(last: Block, block: Block) -> Optional[Block]:
    """Return `last` with one more matrix if `block` continues it with even spacing; else None."""
    step = block.offset - last.offset if last.count == 1 else last.step
    following = last._replace(position=last.position + last.count, offset=last.offset + last.count * step)
    goes_on = step > 0 and following == block._replace(count=last.count, step=last.step)
    return last._replace(count=last.count + 1, step=step) if goes_on else None
