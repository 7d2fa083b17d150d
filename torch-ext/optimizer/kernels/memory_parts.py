"""One run of memory as several tensors, each of which begins at a multiple of some bytes, as new tensors do."""

from __future__ import annotations

import math
from typing import Iterable, Sequence

import torch
from torch import Tensor

# Bytes of a processor's cache line. Torch begins new tensors at one. Operands that begin elsewhere may be summed in
# another order.
CACHE_LINE = 64
# Allocators of devices begin new tensors at multiples of so many bytes.
DEVICE_ALIGNMENT = 512

# The shape and the dtype of a tensor.
Part = tuple[Sequence[int], torch.dtype]


def bytes_of(parts: Iterable[Part], alignment: int) -> int:
    """Return how many bytes `parts` take one after the other, each rounded up to a multiple of `alignment`."""
    return sum(_aligned(_size(part), alignment) for part in parts)


def parts_of(memory: Tensor, parts: Iterable[Part], alignment: int) -> list[Tensor]:
    """Return contiguous tensors, one after the other in `memory`, uint8, which has at least `bytes_of` them."""
    tensors, start = [], 0
    for shape, dtype in parts:
        size = _size((shape, dtype))
        tensors.append(memory[start : start + size].view(dtype).view(shape))
        start += _aligned(size, alignment)
    return tensors


def _size(part: Part) -> int:
    shape, dtype = part
    return math.prod(shape) * dtype.itemsize


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
