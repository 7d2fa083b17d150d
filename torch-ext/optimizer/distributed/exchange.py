"""Parts of matrices to their owners and back: one all-to-all each way, started and waited for."""

from __future__ import annotations

from typing import Collection, NamedTuple, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from .messages import Block, Chunk, Side
from .placement import length


class Transfer(NamedTuple):
    """An exchange on its way. It holds the buffer that is being sent, whose memory must not be used again before."""

    work: dist.Work
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """Return what has come from all ranks."""
        self.work.wait()
        return self.received


@record_function("muon.send")
def start(side: Side, buffer: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Send the front of `buffer` as `side` says, and begin to receive."""
    sent = buffer[: sum(side.sent)]
    received = buffer.new_empty(sum(side.received))
    work = dist.all_to_all_single(received, sent, list(side.received), list(side.sent), group=group, async_op=True)
    return Transfer(work, buffer, received)


def assemble_(matrices: Sequence[Tensor], blocks: Sequence[Block], received: Tensor) -> None:
    """Fill `matrices`, the owned ones of a chunk, from the blocks that have come."""
    pairs = [pair for block in blocks for pair in _views(matrices[block.matrix], block, received)]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [piece for _, piece in pairs])


def disassemble_(buffer: Tensor, blocks: Sequence[Block], matrices: Sequence[Tensor]) -> None:
    """Fill `buffer` with the blocks of `matrices`."""
    pairs = [pair for block in blocks for pair in _views(matrices[block.matrix], block, buffer)]
    if pairs:
        torch._foreach_copy_([piece for _, piece in pairs], [place for place, _ in pairs])


def send_presence_(buffer: Tensor, chunk: Chunk, absent: Collection[int], code: int) -> None:
    """Write the flag of each held part into `buffer`; `absent` are the positions of those without a gradient."""
    flags = [-code if i in absent else code for i in range(len(chunk.presence))]
    buffer.index_copy_(0, _index(chunk.presence, buffer), torch.tensor(flags, dtype=buffer.dtype, device=buffer.device))


def verdicts(chunk: Chunk, received: Tensor, code: int) -> Tensor:
    """Return, float32, for each owned matrix the flag that goes back: 1, 0 where nobody had a gradient, or -1."""
    owned, places = zip(*chunk.presence_in) if chunk.presence_in else ((), ())
    flags = received.index_select(0, _index(places, received)).float()
    counts = flags.new_zeros(2, len(chunk.owned))
    counts.index_add_(1, _index(owned, received), torch.stack([flags > 0, flags.abs() != code]).float())
    present, strange = counts > 0
    return present.float().masked_fill(strange, -1.0)


def send_verdicts_(buffer: Tensor, chunk: Chunk, found: Tensor) -> None:
    """Write the flag of each block that is sent back into `buffer`."""
    owned, places = zip(*chunk.verdicts_out) if chunk.verdicts_out else ((), ())
    flags = found.index_select(0, _index(owned, buffer)).to(buffer.dtype)
    buffer.index_copy_(0, _index(places, buffer), flags)


def _index(places: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(places, dtype=torch.int64, device=like.device)


def _views(matrix: Tensor, block: Block, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return views of a part of `matrix` and of its place in `buffer`, one pair for each run of rows and columns."""
    rows, cols = block.part
    whole = buffer[block.offset : block.offset + block.part.size].view(length(rows), length(cols))
    pairs, row = [], 0
    for top, bottom in rows:
        col = 0
        for left, right in cols:
            piece = whole[row : row + bottom - top, col : col + right - left]
            pairs.append((matrix[top:bottom, left:right], piece))
            col += right - left
        row += bottom - top
    return pairs
