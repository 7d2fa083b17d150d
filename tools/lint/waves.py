"""How many waves of blocks a product takes on a GPU: exact counts, no times.

A GPU of S multiprocessors that each hold c blocks runs S c tiles at once: a wave. The symmetric product has
t (t + 1) / 2 tiles per matrix, the dense one t², t = ceil(m / tile). Fewer tiles save time only if they save waves.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, Optional

from rich.table import Table

# Multiprocessors of an A100, of an H100 or H200, and of a B200.
SMS = (108, 132, 148)
SIDES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a multiprocessor; NVIDIA's consumer GPUs hold fewer threads
MOST_MATRICES = 256  # of a batch
RESERVED_SHARED = 1024  # bytes of shared memory that the system reserves in each block


class Waves(NamedTuple):
    """The tiles of a launch, its waves, and the share of the last wave that has work."""

    tiles: int
    count: int
    last_use: Fraction


def tiles(m: int, tile: int, symmetric: bool, batch: int = 1) -> int:
    """Return how many tiles are computed for `batch` results (m, m)."""
    side = -(-m // tile)
    return batch * (side * (side + 1) // 2 if symmetric else side * side)


def waves(count: int, slots: int) -> Waves:
    """Return the waves of `count` >= 1 tiles on a GPU that runs `slots` = S c at once."""
    number = -(-count // slots)
    return Waves(count, number, Fraction(count - (number - 1) * slots, slots))


def saves_waves(m: int, tile: int, slots: int, batch: int = 1) -> int:
    """Return how many fewer waves the symmetric product takes than the dense one with the same tiles."""
    dense, symmetric = (waves(tiles(m, tile, half, batch), slots).count for half in (False, True))
    return dense - symmetric


def smallest_saving_batch(m: int, tile: int, slots: int) -> Optional[int]:
    """Return the smallest number of matrices for which one launch saves a wave; None if it is above `MOST_MATRICES`."""
    return next((n for n in range(1, MOST_MATRICES + 1) if saves_waves(m, tile, slots, n) > 0), None)


def blocks_per_sm(shared: int, registers: int, warps: int, shared_of_sm: int) -> int:
    """Return how many blocks a multiprocessor holds, from bytes per block, registers per thread and warps per block."""
    by_shared = shared_of_sm // (shared + RESERVED_SHARED)
    return min(by_shared, blocks_by_registers(registers, warps), THREADS // (32 * warps), BLOCKS)


def blocks_by_registers(registers: int, warps: int) -> int:
    """Return how many blocks find room in a multiprocessor's registers, which threads get in multiples of 8."""
    return REGISTERS // (-(-registers // 8) * 8 * 32 * warps)


def wave_table(tile: int, blocks: int) -> Table:
    """Return a table of waves, symmetric and dense, by size and GPU. If none is saved: the batch that saves one."""
    table = Table("m", title=f"waves, symmetric : dense, tiles of {tile}, {blocks} blocks on each multiprocessor")
    table.caption = "in brackets the part of the last symmetric wave that has work"
    for count in SMS:
        table.add_column(f"{count} multiprocessors")
    for m in SIDES:
        table.add_row(str(m), *(_cell(m, tile, count * blocks) for count in SMS))
    return table


def _cell(m: int, tile: int, slots: int) -> str:
    half, dense = (waves(tiles(m, tile, symmetric), slots) for symmetric in (True, False))
    counts = f"{half.count} : {dense.count} ({float(half.last_use):.0%})"
    if half.count < dense.count:
        return counts
    batch = smallest_saving_batch(m, tile, slots)
    return f"{counts}, saves none: " + (f"batch {batch} matrices" if batch else "take smaller tiles")
