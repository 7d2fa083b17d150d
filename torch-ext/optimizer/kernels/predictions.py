"""What products take by a model of tiles and waves: which is taken where nothing was measured.

A GPU works on as many tiles at once as it has multiprocessors, a wave, and the last wave takes as long as a full one:

    seconds = waves (FLOPs of a tile / rate + what a tile costs besides) + what a launch costs

The rates, FLOP/s of a multiprocessor in half precision, and the costs are assumptions, of which only ratios decide.
torch's product multiplies at 97 % of what the device sustains in tiles of 128 x 256. The symmetric kernel's tiles of
128 x 128 read each operand twice as often: on 9.0 the second-level cache delivers about 62 % of what they would need.
GPUs of other capabilities are not predicted, nor sizes for which the kernel has smaller tiles: there torch's products
run until something is measured.
`python -m tools.pages.predictions` writes the table of docs/predictions.md.
"""

from __future__ import annotations

from typing import NamedTuple, Optional


class Rates(NamedTuple):
    """FLOP/s that one multiprocessor sustains, and which part of that the symmetric kernel's main loop reaches."""

    sustained: float
    symmetric: float


class Gpu(NamedTuple):
    """What predictions depend on: capability as one number, 90 for 9.0; multiprocessors; bytes of the cache."""

    capability: int
    multiprocessors: int
    cache: int


# By compute capability. 9.0: 790 TFLOP/s of 132 multiprocessors, as an H100 sustains at its power limit. 8.0: 265 of
# 108, where a multiprocessor multiplies half as fast and the cache keeps up.
RATES = {80: Rates(265e12 / 108, 0.85), 90: Rates(790e12 / 132, 0.62)}

# torch's choices of tiles, and how much of the sustained rate each reaches.
DENSE_TILES = ((128, 256, 0.97), (128, 128, 0.80), (64, 128, 0.60))
DENSE_TILE_SECONDS, DENSE_LAUNCH_SECONDS = 0.8e-6, 2.5e-6

# Prologue and epilogue of a tile. Two blocks share a multiprocessor: about a third of each block's is not hidden behind
# the other, nor is that of the last block.
SYMMETRIC_TILE_SECONDS, EXPOSED = 2.8e-6, 0.35
SYMMETRIC_LAUNCH_SECONDS = 1e-6
TILE = 128

# The side from which on the kernel has these tiles on every device.
SMALLEST = 1024

# How many waves of such tiles a batch of larger matrices has: then the last one, which may be nearly empty, is little.
WAVES = 16

# The gain from which the kernel is taken: the model is not better than that.
WORTH = 1.1


def predicted_gain(gpu: Gpu, m: int, k: int) -> Optional[float]:
    """Return torch's time over the symmetric kernel's for X Xᵀ of X (b, m, k) in half precision; None: not predicted.

    b is `matrices_together`, which follows from m: the answer is the same for every batch, so that a matrix's bits are.
    """
    if gpu.capability not in RATES or m < SMALLEST:
        return None
    batch = matrices_together(gpu, m, 2)
    return dense_seconds(gpu, batch, (m, m, k)) / symmetric_seconds(gpu, batch, m, k)


def matrices_together(gpu: Gpu, m: int, itemsize: int) -> int:
    """Return how many matrices with a short side of m a GPU works on together, at least 1.

    Up to a side of SMALLEST, as many as have their four m x m matrices in the cache, without which products would wait
    for memory: at m = 1024 a product has 170 FLOPs for each byte that it moves, and a Hopper GPU multiplies 184 in the
    time in which it reads one. Larger ones do not need the cache. What they need is to fill WAVES waves.
    """
    if m <= SMALLEST:
        return max(1, gpu.cache // (4 * m * m * itemsize))
    side = _ceil(m, TILE)
    return max(1, WAVES * gpu.multiprocessors // (side * (side + 1) // 2))


def dense_seconds(gpu: Gpu, batch: int, size: tuple[int, int, int]) -> float:
    """Return what torch's product of (batch, m, k) and (batch, k, n) takes by the best of its tiles; size: m, n, k."""
    m, n, k = size
    rate = RATES[gpu.capability].sustained

    def seconds(rows: int, cols: int, part: float) -> float:
        tiles = batch * _ceil(m, rows) * _ceil(n, cols)
        tile = 2 * rows * cols * k / (rate * part) + DENSE_TILE_SECONDS
        return _ceil(tiles, gpu.multiprocessors) * tile + DENSE_LAUNCH_SECONDS

    return min(seconds(*tiles) for tiles in DENSE_TILES)


def symmetric_seconds(gpu: Gpu, batch: int, m: int, k: int) -> float:
    """Return what the symmetric kernel takes for X Xᵀ of X (batch, m, k) in tiles of TILE."""
    rates, side = RATES[gpu.capability], _ceil(m, TILE)
    waves = _ceil(batch * side * (side + 1) // 2, gpu.multiprocessors)
    tile = 2 * TILE * TILE * k / (rates.sustained * rates.symmetric)
    once = SYMMETRIC_TILE_SECONDS + SYMMETRIC_LAUNCH_SECONDS
    return waves * (tile + EXPOSED * SYMMETRIC_TILE_SECONDS) + once


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
