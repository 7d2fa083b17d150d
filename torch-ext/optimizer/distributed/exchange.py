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


def assemble_(matrices: Tensor, blocks: Sequence[Block], received: Tensor) -> None:
    """Fill `matrices` (B, rows, cols) from the blocks that have come."""
    pairs = [pair for block in blocks for pair in _views(matrices[block.matrix], block, received)]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [piece for _, piece in pairs])


def disassemble_(buffer: Tensor, blocks: Sequence[Block], matrices: Tensor) -> None:
    """Fill `buffer` with the blocks of `matrices` (B, rows, cols)."""
    pairs = [pair for block in blocks for pair in _views(matrices[block.matrix], block, buffer)]
    if pairs:
        torch._foreach_copy_([piece for _, piece in pairs], [place for place, _ in pairs])


class Flags(NamedTuple):
    """Where the flags of a chunk are in the buffers, int64 on the device: of held parts, and of those that owners see.

    `matrices_in` and `matrices_out` are the owned matrices that the flags beside them belong to.
    """

    presence: Tensor
    verdicts: Tensor
    matrices_in: Tensor
    presence_in: Tensor
    twins_in: Tensor
    matrices_out: Tensor
    verdicts_out: Tensor


def flags_of(chunk: Chunk, device: torch.device) -> Flags:
    """Return the places of a chunk's flags on `device`."""
    incoming = zip(*chunk.presence_in) if chunk.presence_in else ((), (), ())
    outgoing = zip(*chunk.verdicts_out) if chunk.verdicts_out else ((), ())
    places = chunk.presence, chunk.verdicts, *incoming, *outgoing
    return Flags(*(torch.tensor(own, dtype=torch.int64, device=device) for own in places))


def send_presence_(buffer: Tensor, flags: Flags, absent: Collection[int]) -> None:
    """Write the flag of each held part into `buffer`; `absent` are the positions of those without a gradient."""
    values = torch.tensor([float(i not in absent) for i in range(len(flags.presence))], dtype=buffer.dtype)
    # The device is not waited for.
    buffer.index_copy_(0, flags.presence, values.to(buffer.device, non_blocking=True))


def verdicts(flags: Flags, owned: int, received: Tensor) -> Tensor:
    """Return, float32, for each of the `owned` matrices the flag that goes back: 1, 0 where nobody had a gradient, -1.

    The last is for those of which one of two copies of a part has a gradient, and the other has none.
    """
    found, twins = received.index_select(0, flags.presence_in), received.index_select(0, flags.twins_in)
    counts = torch.zeros(2, owned, device=received.device)
    counts.index_add_(1, flags.matrices_in, torch.stack([found > 0, found != twins]).float())
    present, disputed = counts > 0
    return present.float().masked_fill(disputed, -1.0)


def send_verdicts_(buffer: Tensor, flags: Flags, found: Tensor) -> None:
    """Write the flag of each block that is sent back into `buffer`."""
    buffer.index_copy_(0, flags.verdicts_out, found.index_select(0, flags.matrices_out).to(buffer.dtype))


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
