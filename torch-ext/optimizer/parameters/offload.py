"""Optimizer state in host memory: the device has at most three chunks, one coming in, one in use, one going out.

    incoming stream    H2D 0 | H2D 1 |      H2D 2      |      H2D 3      |
    current stream           |  update of 0  |  update of 1  |  update of 2  |
    outgoing stream                          |      D2H 0      |      D2H 1      |

A bus carries both directions at once. Chunk k uses slot k % 3. All slots are allocated once, so their reuse does not
depend on an allocator. A copy into a slot waits for the copy out of it. So no chunk is overwritten before it is written
back, and none is read again before that, because a chunk always uses the same slot.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Iterator, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.memory_parts import DEVICE_ALIGNMENT, bytes_of, parts_of

SLOTS = 3


def host_zeros_like(tensor: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Return zeros in host memory with the shape and strides of `tensor`, pinned if it is on a GPU."""
    return torch.zeros_like(tensor, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)


class HostChunks:
    """Lists of tensors in host memory (`chunks`) that are copied to `device`, changed, and copied back, one by one.

        for k in range(len(chunks)):
            with host.borrowed(k) as tensors:
                ...  # change them, on the current stream

    They take three times the largest chunk on the device, with each tensor rounded up to `DEVICE_ALIGNMENT`.
    On a GPU, contiguous tensors in pinned memory (`host_zeros_like`) are copied in other streams than the current one;
    for other tensors the host waits. On a CPU the copies are made too. The tensors of `chunks` must not be read or
    changed without `synchronize()`. Not for steps that are captured in a CUDA graph.
    """

    def __init__(self, chunks: Sequence[Sequence[Tensor]], device: torch.device):
        self._host = [list(tensors) for tensors in chunks]
        parts = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in self._host]
        sizes = [bytes_of(each, DEVICE_ALIGNMENT) for each in parts]
        slots = torch.empty(min(SLOTS, len(sizes)), max(sizes), dtype=torch.uint8, device=device)
        self._device = [parts_of(slots[k % SLOTS], each, DEVICE_ALIGNMENT) for k, each in enumerate(parts)]
        self._held: list[Optional[int]] = [None] * SLOTS  # the chunk that each slot has or is being filled with
        self._streams: Optional[_Streams] = None
        if slots.is_cuda:
            self._streams = _Streams(*(torch.cuda.Stream(slots.device) for _ in range(2)))
            # Queued work of the current stream may still use this memory. And when the slots are freed, these streams
            # may still copy: `record_stream` makes the allocator wait for that before it reuses the memory.
            for stream in self._streams.both:
                stream.wait_stream(torch.cuda.current_stream(slots.device))
                slots.record_stream(stream)

    @contextmanager
    def borrowed(self, chunk: int) -> Iterator[list[Tensor]]:
        """Yield the tensors of `chunk` on the device, contiguous, and copy them back after the current stream's work.

        The next chunk comes meanwhile; chunks may be skipped. Only one may be borrowed at a time. After an error host
        memory has what it had before.
        """
        try:
            self._start(chunk)
            if chunk + 1 < len(self._host):
                self._start(chunk + 1)
            if self._streams is not None:
                self._streams.wait_for_arrival(chunk % SLOTS)
            yield self._device[chunk]
            self._write_back(chunk)
        except BaseException:
            self.synchronize()
            if self._streams is not None:
                self._streams.wait_for_current()
            raise

    def synchronize(self) -> None:
        """Wait until all copies back to host memory are done, and forget the chunks on the device."""
        if self._streams is not None:
            for stream in self._streams.both:
                stream.synchronize()
        self.forget()

    def forget(self) -> None:
        """Forget chunks that were fetched ahead and not used: only the host's tensors count. Waits for nothing."""
        self._held = [None] * SLOTS

    def _overlaps(self, host: Tensor) -> bool:
        """Whether copies of a tensor run beside the host: without streams nothing would say when they are done."""
        return self._streams is not None and host.is_contiguous()

    def _start(self, chunk: int) -> None:
        """Queue the copy of `chunk` into its slot, unless it is already there."""
        number = chunk % SLOTS
        if self._held[number] == chunk:
            return
        with nullcontext() if self._streams is None else self._streams.arriving(number):
            for host, slot in zip(self._host[chunk], self._device[chunk]):
                slot.copy_(host, non_blocking=self._overlaps(host))
        self._held[number] = chunk

    def _write_back(self, chunk: int) -> None:
        """Queue the copy of `chunk` out of its slot, behind the current stream's work."""
        with nullcontext() if self._streams is None else self._streams.departing(chunk % SLOTS):
            for host, slot in zip(self._host[chunk], self._device[chunk]):
                host.copy_(slot, non_blocking=self._overlaps(host))
        # From here on only the host's tensors count: they may be changed before the chunk is borrowed again.
        self._held[chunk % SLOTS] = None


class _Streams:
    """The streams of both directions, and for each slot the events of its last copies in and out."""

    def __init__(self, incoming: torch.cuda.Stream, outgoing: torch.cuda.Stream):
        self.both = incoming, outgoing
        self._arrived, self._departed = ([torch.cuda.Event() for _ in range(SLOTS)] for _ in range(2))

    @contextmanager
    def arriving(self, slot: int) -> Iterator[None]:
        """Make copies into a slot wait for the last copy out of it."""
        incoming, _ = self.both
        incoming.wait_event(self._departed[slot])
        with torch.cuda.stream(incoming):
            yield
        self._arrived[slot].record(incoming)

    def wait_for_current(self) -> None:
        """Make later copies into slots wait for the work queued on the current stream, which may still use one."""
        incoming, _ = self.both
        incoming.wait_stream(torch.cuda.current_stream(incoming.device))

    def wait_for_arrival(self, slot: int) -> None:
        """Make the current stream wait for the copies into a slot."""
        torch.cuda.current_stream(self.both[0].device).wait_event(self._arrived[slot])

    @contextmanager
    def departing(self, slot: int) -> Iterator[None]:
        """Make copies out of a slot wait for the work queued on the current stream."""
        _, outgoing = self.both
        outgoing.wait_stream(torch.cuda.current_stream(outgoing.device))
        with torch.cuda.stream(outgoing):
            yield
        self._departed[slot].record(outgoing)
