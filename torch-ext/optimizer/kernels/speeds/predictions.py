"""A model of how long products take, from tiles and waves. It decides where nothing was measured.

A GPU works on as many tiles at once as it has multiprocessors. That is a wave, and the last wave takes as long as a
full one:

    seconds = waves (FLOPs of a tile / rate + overhead of a tile) + overhead of a launch

The rates (FLOP/s of a multiprocessor in half precision) and the overheads are assumptions; only their ratios matter.
The rates of 9.0 were set after an H200 had been timed. torch's product reaches 97 % of the sustained rate in tiles of
128 x 256. The symmetric kernel has tiles of 128 x 128 until something is measured. Nothing is predicted for GPUs of
other capabilities, nor for sizes with smaller tiles: there torch's products run until something is measured.

`python -m tools.pages.predictions` writes the table of docs/predictions.md.
"""

from __future__ import annotations

from typing import NamedTuple, Optional


class Rates(NamedTuple):
    """FLOP/s that one multiprocessor sustains, and the share of them that the symmetric kernel's main loop reaches."""

    sustained: float
    symmetric: float


class Gpu(NamedTuple):
    """What predictions need: compute capability as one number (90 is 9.0), multiprocessors, bytes of the L2 cache."""

    capability: int
    multiprocessors: int
    cache: int


# By compute capability. 9.0: 680 TFLOP/s with 132 multiprocessors, which an H200 sustains at its power limit. 8.0, not
# measured: 265 TFLOP/s with 108.
RATES = {80: Rates(265e12 / 108, 0.85), 90: Rates(680e12 / 132, 0.88)}

# The tiles that torch chooses from, and which share of the sustained rate each reaches.
DENSE_TILES = ((128, 256, 0.97), (128, 128, 0.80), (64, 128, 0.60))
DENSE_TILE_SECONDS, DENSE_LAUNCH_SECONDS = 0.8e-6, 2.5e-6

# Prologue and epilogue of a tile. Two blocks share a multiprocessor and hide each other's, except for about a third.
# Nothing hides those of the last block.
SYMMETRIC_TILE_SECONDS, EXPOSED = 2.8e-6, 0.35
SYMMETRIC_LAUNCH_SECONDS = 1e-6
TILE = 128

# The side of the squares that `hopper_gemm_` computes by pairs of multiprocessors.
SQUARE = 256

# Up to this side, by compute capability, the kernel has tiles of 64. 768 is a guess: a matrix of side 768 has only 21
# tiles of 128, fewer than the 108 to 148 multiprocessors. On 9.0 it is 256, since tiles of 128 beat torch's product
# there for batches of sides 512 and 768 (64 x 512 x 1280 and 48 x 768 x 768 in
# benchmarks/results/nvidia-h200-2026-11-27.json).
SMALL_SIDES, SMALL_SIDE = {90: 256}, 768

# Up to this side the matrices that are worked on together share the cache.
CACHED = 1024

# A batch of larger matrices is filled up to this many waves, so that a nearly empty last wave costs little.
WAVES = 16

# The kernel is chosen from this predicted gain on. Smaller gains are within the model's error.
WORTH = 1.1


def predicted_gain(gpu: Gpu, m: int, k: int) -> Optional[float]:
    """Return torch's time divided by the symmetric kernel's for X Xᵀ of X (m, k) in half precision, or None.

    None means that there is no prediction. Times are per matrix, each at the number of matrices `in_full_waves`. That
    number depends on m alone: the answer, and with it the bits of a matrix, are the same for every batch.
    """
    if gpu.capability not in RATES or m <= small_side(gpu.capability):
        return None
    most = matrices_together(gpu, m, 2)
    torchs, ours = (in_full_waves(gpu, m, most, is_symmetric) for is_symmetric in (False, True))
    return (dense_seconds(gpu, torchs, (m, m, k)) / torchs) / (symmetric_seconds(gpu, ours, m, k) / ours)


def small_side(capability: int) -> int:
    """Return the largest side for which the symmetric kernel has tiles of 64 where nothing was measured."""
    return SMALL_SIDES.get(capability, SMALL_SIDE)


def matrices_together(gpu: Gpu, m: int, itemsize: int) -> int:
    """Return how many matrices with a short side of m a GPU works on together, at least 1.

    Up to a side of CACHED, the four m x m matrices of each must fit into the cache, since products would otherwise
    wait for memory: a symmetric product of two matrices has m / 6 FLOPs for each byte that it moves (m³ FLOPs, three
    matrices of 2 m² bytes), and an H200 computes 160 in the time in which it copies one (680 TFLOP/s and 4.24 TB/s).
    That is reached at m = 960. Larger matrices do not need the cache; their number is chosen to fill WAVES waves.
    """
    if m <= CACHED:
        return max(1, gpu.cache // (4 * m * m * itemsize))
    return max(1, WAVES * gpu.multiprocessors // triangle(m, TILE))


def triangle(m: int, side: int) -> int:
    """Return how many squares of `side` cover the diagonal of an m x m matrix and what is below it."""
    squares = _ceil(m, side)
    return squares * (squares + 1) // 2


def in_whole_rounds(gpu: Gpu, m: int, most: int) -> int:
    """Return how many matrices with a short side of m, up to `most`, fill the rounds of `hopper_gemm_` best.

    In a round each pair of multiprocessors computes one square of SQUARE. 66 pairs finish the three squares of each of
    22 matrices of 512 rows in one round, but need two rounds for those of 25. Equally full rounds: the most matrices.
    """
    squares, pairs = triangle(m, SQUARE), max(1, gpu.multiprocessors // 2)
    return max(_ends(squares, pairs, most), key=lambda count: (count / _ceil(count * squares, pairs), count))


def in_full_waves(gpu: Gpu, m: int, most: int, symmetric: bool) -> int:
    """Return the number of m x m matrices, up to `most`, for which a product takes least time per matrix.

    The product is the symmetric kernel's, or torch's: 132 multiprocessors multiply 7 matrices of 768 rows in one wave
    of torch's tiles, and 11 in two. Above CACHED the answer is `most`, which fills enough waves, and so it is
    for capabilities without rates.
    """
    if gpu.capability not in RATES or m > CACHED:
        return most
    dense = [_ceil(m, rows) * _ceil(m, cols) for rows, cols, _ in DENSE_TILES]
    tiles = [triangle(m, TILE)] if symmetric else dense
    ends = set().union(*(_ends(each, gpu.multiprocessors, most) for each in tiles))

    def seconds(count: int) -> float:
        return symmetric_seconds(gpu, count, m, m) if symmetric else dense_seconds(gpu, count, (m, m, m))

    return max(ends, key=lambda count: (count / seconds(count), count))


def _ends(tiles: int, units: int, most: int) -> set[int]:
    """Return the counts of matrices, up to `most`, that may be best: `most`, and those with which a late wave ends.

    A matrix has `tiles`, and a wave `units` of them. Late are the last WAVES: batches that end with earlier ones are as
    full, but need more launches.
    """
    last = most * tiles // units
    ends = (wave * units // tiles for wave in range(max(1, last - WAVES + 1), last + 1))
    return {most, *(count for count in ends if count)}


def dense_seconds(gpu: Gpu, batch: int, size: tuple[int, int, int]) -> float:
    """Return the seconds of torch's product of (batch, m, k) and (batch, k, n) with its best tiles; size: m, n, k."""
    m, n, k = size
    rate = RATES[gpu.capability].sustained

    def seconds(rows: int, cols: int, part: float) -> float:
        tiles = batch * _ceil(m, rows) * _ceil(n, cols)
        tile = 2 * rows * cols * k / (rate * part) + DENSE_TILE_SECONDS
        return _ceil(tiles, gpu.multiprocessors) * tile + DENSE_LAUNCH_SECONDS

    return min(seconds(*tiles) for tiles in DENSE_TILES)


def symmetric_seconds(gpu: Gpu, batch: int, m: int, k: int) -> float:
    """Return the seconds of the symmetric kernel for X Xᵀ of X (batch, m, k) in tiles of TILE."""
    rates, waves = RATES[gpu.capability], _ceil(batch * triangle(m, TILE), gpu.multiprocessors)
    tile = 2 * TILE * TILE * k / (rates.sustained * rates.symmetric)
    once = SYMMETRIC_TILE_SECONDS + SYMMETRIC_LAUNCH_SECONDS
    return waves * (tile + EXPOSED * SYMMETRIC_TILE_SECONDS) + once


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
