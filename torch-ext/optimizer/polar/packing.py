"""How many matrices are packed together, and on how many of them products work at once."""

from __future__ import annotations

import functools

import torch

from ..iteration import Iteration
from ..kernels.native_products import fits_a_core
from ..kernels.speeds import predictions
from ..kernels.speeds.machine import gpu_of
from ..kernels.tracing import constant_while_traced

# The most that is packed together on a GPU. The last round of tiles takes as long as a full one, and should be one of
# many. Eleven float32 matrices of 2048 x 8192 are 704 MiB: their m x m products fill six rounds of `hopper_gemm_` on an
# H100. Eight would take five rounds.
BATCH_BYTES = 704 * 2**20

# Bytes of the cache that each core of a CPU usually has to itself.
_CORE_CACHE = 2**21

# Stands for a device that torch does not describe.
_SMALL_GPU = predictions.Gpu(0, 1, 2**21)


def packed_together(size: tuple[int, int], itemsize: int, most_bytes: int = BATCH_BYTES) -> int:
    """Return how many matrices of `size`, whose elements have `itemsize` bytes, `most_bytes` hold: at least 1."""
    return max(1, most_bytes // (size[0] * size[1] * itemsize))


def matrices_together(device: torch.device, size: tuple[int, int], iteration: Iteration) -> int:
    """Return how many wide matrices of `size` are worked on together at most.

    A GPU gets as many as fill it (`predictions.matrices_together`), in full waves or rounds of the product of squares.
    On a CPU each thread works alone on matrices that fit (`fits_a_core`), on as many as have their four m x m matrices
    in its core's cache. Larger matrices come one at a time.
    """
    m, n = size
    itemsize = iteration.chain_dtype.itemsize
    if device.type != "cpu":
        # AMD's capabilities have numbers of NVIDIA's, whose rates do not hold there.
        gpu = (None if torch.version.hip else gpu_of(device)) or _SMALL_GPU
        # A tracer would warn of the cache, and ignore it.
        together_on = _together_on if torch.compiler.is_compiling() else _remembered_together_on
        return together_on(gpu, m, itemsize, iteration.products.square_name)
    return max(1, _CORE_CACHE // (4 * m * m * itemsize)) * _threads() if fits_a_core(m, n, itemsize) else 1


def even_pieces(count: int, length: int) -> list[tuple[int, int]]:
    """Return start and end of the fewest possible pieces of at most `length` out of `count`, as even as possible."""
    pieces = -(-count // length)
    return [(piece * count // pieces, (piece + 1) * count // pieces) for piece in range(pieces)]


def _together_on(gpu: predictions.Gpu, m: int, itemsize: int, square_name: str) -> int:
    most = predictions.matrices_together(gpu, m, itemsize)
    if square_name == "hopper_gemm":
        return predictions.in_whole_rounds(gpu, m, most)
    return predictions.in_full_waves(gpu, m, most, square_name == "symmetric_gemm")


_remembered_together_on = functools.cache(_together_on)


@constant_while_traced
def _threads() -> int:
    return torch.get_num_threads()
