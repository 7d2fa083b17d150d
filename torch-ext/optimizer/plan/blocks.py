"""Blocks: where parts of matrices are in a buffer and in a batch, in strides and offsets that a step only applies."""

from __future__ import annotations

from itertools import product
from typing import Iterator, Mapping, NamedTuple, Sequence

from .layout import length
from .messages import PartPlace


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
    for place in parts:
        if place.matrix in positions:
            for block in _runs(place, positions[place.matrix]):
                _join(blocks, block)
    return tuple(blocks)


def _runs(place: PartPlace, position: int) -> Iterator[Block]:
    """Yield a block for each run of rows and columns of a part."""
    rows, cols = place.part
    width = length(cols)
    firsts_of_rows, firsts_of_cols = _firsts(rows), _firsts(cols)
    for (row, (top, bottom)), (col, (left, right)) in product(zip(firsts_of_rows, rows), zip(firsts_of_cols, cols)):
        offset = place.offset + row * width + col
        yield Block(1, position, top, left, bottom - top, right - left, offset, place.part.size, width)


def _firsts(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many indices are in front of each run."""
    firsts = [0]
    for start, stop in runs:
        firsts.append(firsts[-1] + stop - start)
    return firsts


def _join(blocks: list[Block], block: Block) -> None:
    """Append `block`, or lengthen the last one by it where it goes on evenly."""
    last = blocks[-1] if blocks else None
    alike = last is not None and last._replace(count=1, position=0, offset=0, step=0) == block._replace(
        position=0, offset=0, step=0
    )
    if alike and block.position == last.position + last.count:
        step = block.offset - last.offset if last.count == 1 else last.step
        if block.offset == last.offset + last.count * step and step > 0:
            blocks[-1] = last._replace(count=last.count + 1, step=step)
            return
    blocks.append(block)
