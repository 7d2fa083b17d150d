"""Lists of matrices as stacks: rows of equal shape, read into one tensor (k, rows, cols) and written back.

What one torch function does to a stack it does with one launch, however many matrices the list has. A stack is small
enough for a CPU's cache, and bounds the memory that intermediate results take. No result depends on how lists are cut:
all arithmetic is of single elements, by functions that round once (`arithmetic.py`), or of whole blocks.
"""

from __future__ import annotations

import itertools
from typing import Iterator, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .arithmetic import narrowed

# The most elements of a stack, unless a single row has more. On a CPU it is for each thread, whose intermediate results
# stay in its core's cache. On other devices a launch has enough to do that starting it does not count.
_THREAD_ELEMENTS = 2**15
_DEVICE_ELEMENTS = 2**25


class Rows(NamedTuple):
    """Some rows of the matrices at one index of the lists."""

    index: int
    start: int
    stop: int

    def of(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return a view of these rows in one of the lists."""
        return matrices[self.index][self.start : self.stop]


Piece = Sequence[Rows]


def pieces(matrices: Sequence[Tensor]) -> Iterator[Piece]:
    """Yield all rows of the matrices in pieces, each of which is one stack; matrices without elements are left out."""
    on_cpu = bool(matrices) and matrices[0].is_cpu
    most = _THREAD_ELEMENTS * torch.get_num_threads() if on_cpu else _DEVICE_ELEMENTS
    by_shape: dict[tuple[int, int], list[Rows]] = {}
    for index, matrix in enumerate(matrices):
        rows, cols = matrix.shape
        height = max(1, min(rows, most // max(cols, 1)))
        for start in range(0, rows if cols else 0, height):
            stop = min(start + height, rows)
            by_shape.setdefault((stop - start, cols), []).append(Rows(index, start, stop))
    for (rows, cols), of_shape in by_shape.items():
        count = max(1, most // (rows * cols))
        yield from (of_shape[i : i + count] for i in range(0, len(of_shape), count))


def stacked(matrices: Sequence[Tensor], piece: Piece) -> Tensor:
    """Return a piece of a list (k, rows, cols); it may be a view, so nobody writes to it."""
    views = [rows.of(matrices) for rows in piece]
    return views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)


def write_(matrices: Sequence[Tensor], piece: Piece, values: Tensor, is_open: Optional[Tensor] = None) -> None:
    """Write `values` (k, rows, cols), rounded once, into a piece of a list, but only where `is_open`."""
    views = [rows.of(matrices) for rows in piece]
    values = narrowed(values, views[0].dtype)
    if is_open is not None:
        values = torch.where(is_open, values, stacked(matrices, piece))
    torch._foreach_copy_(views, list(values.unbind()))


def parts_of(buffer: Tensor, matrices: Sequence[Tensor], offsets: Optional[Sequence[int]]) -> list[Tensor]:
    """Return each matrix's part of a batch, or of flat memory, with the matrix's shape."""
    if offsets is None:
        return list(buffer.unbind())
    return [buffer[offset : offset + m.numel()].view(m.shape) for m, offset in zip(matrices, offsets)]


def on_device(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return values (n) on a device without a copy from the CPU, for which the host would wait: they are filled in."""
    if values.device == device:
        return values.to(dtype)
    runs = [(value, len(list(same))) for value, same in itertools.groupby(values.tolist())]
    filled = [torch.full((count,), value, dtype=dtype, device=device) for value, count in runs]
    filled = filled or [torch.empty(0, dtype=dtype, device=device)]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def of_piece(values: Tensor, piece: Piece) -> Tensor:
    """Return the value of each matrix of a piece (k, 1, 1); (1, 1, 1) if `values` has one for all matrices."""
    if values.numel() == 1:
        return values.view(1, 1, 1)
    return torch.stack([values[rows.index] for rows in piece]).view(-1, 1, 1)


class Gate(NamedTuple):
    """Which matrices take part: `active` (B) and `found_inf` (1), on their device; None lets all through."""

    active: Optional[Tensor]
    found_inf: Optional[Tensor]

    @classmethod
    def on(cls, device: torch.device, active: Optional[Tensor], found_inf: Optional[Tensor]) -> Gate:
        """Return the gate of an operation's arguments on the device of its matrices."""
        active = None if active is None else on_device(active.reshape(-1), device, torch.bool)
        finite = None if found_inf is None else on_device(found_inf.reshape(-1), device, torch.float32)
        return cls(active, finite)

    def is_open(self, piece: Piece) -> Optional[Tensor]:
        """Return (k, 1, 1), or (1, 1, 1) for all, where the matrices of a piece take part; None if all do."""
        open_for = None if self.found_inf is None else of_piece(self.found_inf == 0, piece)
        if self.active is None:
            return open_for
        active = of_piece(self.active, piece)
        return active if open_for is None else active & open_for
