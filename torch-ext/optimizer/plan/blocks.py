"""Blocks: where parts of matrices are in a buffer and in a batch, in strides and offsets that a step only applies."""

from __future__ import annotations

from typing import Iterator, Mapping, NamedTuple, Optional, Sequence

from .layout import length
from .messages import PartPlace
from .shards import Part


class Block(NamedTuple):
    """The same rows x cols of `count` neighbours in a batch, and their places in a buffer, evenly spaced.

    For example, a rank sends rows 4 to 7 of three matrices 8 x 2, flags after them: count 3, batch position 0, top 4,
    left 0, 4 x 2, and in the buffer offset 0, 8 elements from one matrix to the next, 2 from one row to the next.
    """

    count: int
    position: int  # of the first matrix in the batch
    top: int
    left: int
    rows: int
    cols: int
    offset: int  # in the buffer
    step: int  # from one matrix to the next there
    row_step: int


def blocks_of(parts: Sequence[PartPlace], positions: Mapping[int, int]) -> tuple[Block, ...]:
    """Return the blocks of those `parts` whose matrix has an entry in `positions`, its position in a batch.

    Parts of a sender that are alike and follow each other become one block, so that a step copies them at once.
    """
    blocks: list[Block] = []
    for matrix, part, offset in parts:
        for block in _runs(part, positions[matrix], offset) if matrix in positions else ():
            joined = _joined(blocks[-1], block) if blocks else None
            blocks[-1:] = [joined] if joined else [*blocks[-1:], block]
    return tuple(blocks)


def _runs(part: Part, position: int, offset: int) -> Iterator[Block]:
    """Yield a block for each run of rows and columns of a part."""
    width, row = length(part.cols), 0
    for top, bottom in part.rows:
        col = 0
        for left, right in part.cols:
            place = offset + row * width + col
            yield Block(1, position, top, left, bottom - top, right - left, place, part.size, width)
            col += right - left
        row += bottom - top


def _joined(last: Block, block: Block) -> Optional[Block]:
    """Return the last block with another matrix, where `block` goes on evenly; else None."""
    step = block.offset - last.offset if last.count == 1 else last.step
    following = last._replace(position=last.position + last.count, offset=last.offset + last.count * step)
    goes_on = step > 0 and following == block._replace(count=last.count, step=last.step)
    return last._replace(count=last.count + 1, step=step) if goes_on else None
