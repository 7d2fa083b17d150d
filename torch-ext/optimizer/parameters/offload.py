"""Optimizer state in host memory: on the device are at most two chunks of it, the one in use and the one after it.

    copy stream     H2D 0 | H2D 1 |          | D2H 0 | H2D 2 |          | D2H 1 | H2D 3 |
    current stream          |  update of 0   |         |  update of 1   |         |  update of 2

Chunk k lives in slot k % 2. Both slots are allocated once, so that no allocator has to be trusted with their reuse, and
all copies go through one stream, so that a slot is written back before the next chunk overwrites it, and a chunk is
written back before it is read again.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Iterator, Optional, Sequence

import torch
from torch import Tensor

# Of the tensors in a slot, as the device's own allocator aligns them.
ALIGNMENT = 512


def host_zeros_like(tensor: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Return zeros in host memory with the shape and strides of `tensor`, pinned where it is on a GPU."""
    return torch.zeros_like(tensor, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


class HostChunks:
    """Lists of tensors in host memory, `chunks`, that come to `device` one list after the other and go back changed.

        for k in range(len(chunks)):
            tensors = host.fetch(k)
            ...  # change them, on the current stream
            host.write_back(k)

    On the device they take `device_bytes`: twice the largest chunk, each tensor rounded up to `ALIGNMENT` bytes. On a
    GPU copies run beside the current stream, of contiguous tensors in pinned memory (`host_zeros_like`); of others the
    host waits for them. On a CPU they are made all the same. The tensors of `chunks` must not be read or changed
    without `synchronize()`. Not for steps that are captured in a CUDA graph.
    """

    def __init__(self, chunks: Sequence[Sequence[Tensor]], device: torch.device):
        self._host = [list(tensors) for tensors in chunks]
        sizes = [sum(map(_slot_bytes, tensors)) for tensors in self._host]
        slots = torch.empty(min(2, len(sizes)), max(sizes, default=0), dtype=torch.uint8, device=device)
        self._device = [_cut(slots[k % 2], tensors) for k, tensors in enumerate(self._host)]
        self._held: list[Optional[int]] = [None, None]  # the chunk that a slot has, or is being filled with
        self._in_use: Optional[int] = None
        self.device_bytes = slots.numel()
        self._stream: Optional[torch.cuda.Stream] = None
        if slots.is_cuda:
            self._stream = torch.cuda.Stream(slots.device)
            self._arrived = [torch.cuda.Event(), torch.cuda.Event()]
            # The memory may have belonged to work that is still in the current stream's queue; and when the slots are
            # freed, copies may be in this one's: the allocator then waits for it before it gives them away.
            self._stream.wait_stream(torch.cuda.current_stream(slots.device))
            slots.record_stream(self._stream)

    @property
    def on_device(self) -> set[int]:
        """The chunks that are on the device or on their way to it."""
        return {chunk for chunk in self._held if chunk is not None}

    def fetch(self, chunk: int) -> list[Tensor]:
        """Return the tensors of `chunk` on the device, contiguous, until it is written back; start the next one's way.

        Chunks may be left out. Raises RuntimeError while another chunk is in use.
        """
        if self._in_use is not None:
            raise RuntimeError(f"chunk {self._in_use} must be written back before chunk {chunk} is fetched")
        self._start(chunk)
        if chunk + 1 < len(self._host):
            self._start(chunk + 1)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._arrived[chunk % 2])
        self._in_use = chunk
        return self._device[chunk]

    def write_back(self, chunk: int) -> None:
        """Copy the tensors of `chunk`, fetched last, back into host memory, after what the current stream has queued.

        Raises RuntimeError if it is not the chunk in use.
        """
        if self._in_use != chunk:
            raise RuntimeError(f"chunk {chunk} is written back, but {self._in_use} was fetched")
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._copying():
            for host, own in zip(self._host[chunk], self._device[chunk]):
                host.copy_(own, non_blocking=host.is_contiguous())
        # The host's tensors are the only ones from here on: they may be changed before the chunk is fetched again.
        self._held[chunk % 2] = self._in_use = None

    @contextmanager
    def borrowed(self, chunk: int) -> Iterator[list[Tensor]]:
        """Fetch `chunk` and write it back; after an error host memory has what it had before."""
        try:
            yield self.fetch(chunk)
            self.write_back(chunk)
        except BaseException:
            self.synchronize()
            raise

    def synchronize(self) -> None:
        """Wait until host memory has all that was written back, and forget what is on the device."""
        if self._stream is not None:
            self._stream.synchronize()
        self._held, self._in_use = [None, None], None

    def _start(self, chunk: int) -> None:
        """Queue the copy of `chunk` into its slot, unless it is there.

        The slot is free: its last chunk, if it was in use, has been written back through this very stream.
        """
        slot = chunk % 2
        if self._held[slot] == chunk:
            return
        with self._copying():
            for host, own in zip(self._host[chunk], self._device[chunk]):
                own.copy_(host, non_blocking=host.is_contiguous())
        if self._stream is not None:
            self._arrived[slot].record(self._stream)
        self._held[slot] = chunk

    def _copying(self):
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _slot_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT


def _cut(slot: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors with the shapes and dtypes of `like`, one after the other in `slot`."""
    cut, first = [], 0
    for tensor in like:
        own = slot[first : first + tensor.numel() * tensor.itemsize]
        cut.append(own.view(tensor.dtype).view(tensor.shape))
        first += _slot_bytes(tensor)
    return cut
