"""Launch configurations: measured ones by device and size (`measurements.py`), and safe ones where nothing is known."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional

import torch

from ..formats import dtype_name
from ..speeds.gains import measured_sizes
from ..speeds.machine import gpu_key
from ..speeds.measurement_file import Need
from ..speeds.measurements import (
    Ranks,
    candidate_name,
    exact_or_nearest,
    failed,
    measured_here,
    nearest_shipped,
)
from ..speeds.predictions import small_side
from .hopper_gemm import is_built


class Config(NamedTuple):
    """How a symmetric product is launched: square tiles of `tile`, summed over k in steps of `tile_k`.

    A tile of 256 is shared by two programs of 128 rows, or, in `COMPILED`, by two multiprocessors. Only these sum some
    tiles in several `sections`.
    """

    tile: int
    tile_k: int
    group: int
    warps: int
    stages: int
    sections: int = 1


class SmallConfig(NamedTuple):
    """How `small_polar` is launched: rows padded to `side`, panels of `width` columns, summed in steps of `depth`.

    `on_chip` is 1 if the square matrices stay on the multiprocessor, 0 if they live in scratch memory.
    """

    side: int
    width: int
    depth: int
    warps: int
    stages: int
    on_chip: int


class Target(NamedTuple):
    """What a kernel is compiled for: `cuda` with its compute capability (90 is 9.0), or `hip` with 0."""

    backend: str
    capability: int


# The product of `hopper_gemm.py`, which is compiled with these numbers: two multiprocessors, of 12 warps each, work on
# a square of 256. It is among the configurations, so it is proven, raced and remembered like the others.
HOPPER = Config(256, 64, 8, 12, 4)
COMPILED = tuple(HOPPER._replace(sections=sections) for sections in (1, 3, 5))
HOPPERS = Target("cuda", 90)  # where it runs

# Small matrices are padded to one of these numbers of rows.
PADDED_SIDES = (16, 32, 64, 128)

# (tile, tile_k, warps, stages) that compete for symmetric products, by generation (9 is 9.0). The lab tries more.
# Two tiles and an addend fill the registers: some versions of Triton spill a few.
_SHAPES_ELSEWHERE = (256, 32, 8, 3), (256, 32, 8, 4), (128, 32, 8, 3), (64, 64, 4, 3)
_SHAPES_10 = (256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (64, 64, 8, 4)
_SHAPES_9 = (
    *((256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3)),
    *((64, 64, 4, 4), (64, 128, 4, 3)),
)
_USUAL = {9: _SHAPES_9, 10: _SHAPES_10, 11: _SHAPES_10}
_SHAPES_HIP = (256, 64, 8, 2), (256, 32, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2)
_GROUP = 8

# ((width, depth), warps) that compete for small matrices, by the padded number of rows. They compile for every target
# without spilling.
_IN_SCRATCH = {
    16: (((16, 16), 1), ((16, 16), 2)),
    32: (((32, 32), 2), ((32, 32), 4), ((16, 32), 2)),
    64: (((64, 64), 4), ((64, 64), 8), ((32, 64), 4)),
    128: (((64, 64), 8), ((64, 32), 8), ((32, 64), 8)),
}
_STAGES_IN_SCRATCH = 2
# The same with squares on the chip, with the number of stages: by rows, then by generation (9 is 9.0). Of others some
# spill, some do not compile, and some have not been tried. What Triton 3.6 compiles for 9.0 with 128 rows is
# wrong on an H200: some of it reads outside shared memory, which loses the GPU.
_ON_CHIP = {
    16: dict.fromkeys((8, 9, 10, 12), (((16, 16), 1, 2),)),
    32: dict.fromkeys((8, 9, 10, 12), (((32, 32), 4, 2),)),
    64: dict.fromkeys((9, 10), (((64, 64), 4, 2), ((64, 64), 4, 4))),
    128: {},
}


def target_of(device: torch.device) -> Target:
    """Return the target that kernels are compiled for on a GPU."""
    if torch.version.hip:
        return Target("hip", 0)
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", 10 * major + minor)


def chosen_config(
    device_name: str,
    target: Target,
    dtype: torch.dtype,
    shape: tuple[int, int],
    lie: tuple[bool, bool],
    among: Optional[Ranks] = None,
) -> Config:
    """Return the configuration measured nearest to `shape`, (m, k), or the safe one if there is no measurement.

    `lie` says of the operands whether they come by descriptors and whether they are aligned. Measurements are made on
    aligned operands. On others the same configuration may spill, so they get the safe one. `among` has the ranks that
    share the matrices: only what exactly these have agreed on counts (`measured_here`).
    """
    descriptors, aligned = lie
    entry = nearest(device_name, dtype, *shape, among=among) if aligned else None
    if entry is None:
        return safe_config(target, dtype, shape[0], descriptors, aligned)
    return config_of(entry, Config)


def config_of(entry: Mapping[str, Any], kind: type) -> Any:
    """Return the Config or SmallConfig of an entry of measurements."""
    return kind(*(entry[field] for field in kind._fields))


def safe_config(target: Target, dtype: torch.dtype, m: int, descriptors: bool, aligned: bool) -> Config:
    """Return a configuration that compiles for `target` without spilling, whatever the size.

    `descriptors`: operands come through tensor descriptors. `aligned`: addresses are multiples of 16 bytes, sizes and
    strides are multiples of 16 elements; otherwise loads and stores are narrow and take more registers.
    `tools/lint/kernels.py` compiles every value that this can return for its target.
    """
    if dtype == torch.float32:  # no matrix instruction multiplies it exactly; larger tiles spill on some targets
        return Config(32, 32, 8, 4, 2)
    if not aligned:
        return Config(64, 64, 8, 8, 3) if descriptors else Config(64, 32, 8, 8, 2)
    small = m <= small_side(target.capability)
    if target.backend == "hip":
        return Config(64 if small else 128, 64, 8, 8, 2)
    if target.capability < 90 or target.capability >= 120:  # registers hold the sums, and 12.0 has less shared memory
        return Config(64 if small else 128, 32, 8, 8, 3)
    # Two blocks of tiles of 128 fit into a multiprocessor of 9.0 with 3 stages: one multiplies while the other stores.
    stages = 4 if descriptors and (small or target.capability >= 100) else 3
    warps = 4 if small and target.capability < 100 else 8  # on 10.0 tiles of 64 with a diagonal spill with 4
    return Config(64 if small else 128, 64, 8, warps, stages)


def usual_configs(target: Target, dtype: torch.dtype) -> list[Config]:
    """Return the configurations that compete for symmetric products. float32 has none.

    `COMPILED` are among them on 9.0, also where they are not built.
    """
    if dtype == torch.float32:
        return []
    shapes = _SHAPES_HIP if target.backend == "hip" else _USUAL.get(target.capability // 10, _SHAPES_ELSEWHERE)
    usual = [Config(tile, tile_k, _GROUP, warps, stages) for tile, tile_k, warps, stages in shapes]
    return usual + (list(COMPILED) if target == HOPPERS else [])


def chosen_small_config(device_name: str, target: Target, dtype: torch.dtype, shape: tuple[int, int]) -> SmallConfig:
    """Return the configuration of `small_polar` measured nearest to `shape`, (m, n), or the safe one.

    A configuration that was measured for another number of padded rows does not fit and is ignored.
    """
    # Of shared matrices only those come here whose ranks have agreed on it: nothing ships that others would take.
    entry = nearest(device_name, dtype, *shape, kernel="small_polar")
    if entry is None or entry["side"] != padded_side(shape[0]):
        return safe_small_config(target, dtype, shape[0])
    return config_of(entry, SmallConfig)


def safe_small_config(target: Target, dtype: torch.dtype, m: int) -> SmallConfig:
    """Return a configuration of `small_polar` for m rows that compiles for `target` without spilling.

    `dtype` is the work dtype. As for `safe_config`, `tools/lint/kernels.py` compiles every value.
    """
    side = padded_side(m)
    if dtype != torch.float32:
        return SmallConfig(side, min(side, 64), min(side, 64), max(1, side // 16), 2, 0)
    if target.backend == "hip":  # there scalars have their own registers, and those are few
        return SmallConfig(side, 16 if side == 128 else min(side, 32), 16, 4, 2, 0)
    return SmallConfig(side, min(side, 32), 16, 8 if side > 32 else 4, 2, 0)


def usual_small_configs(target: Target, dtype: torch.dtype, side: int) -> list[SmallConfig]:
    """Return the configurations that compete for matrices padded to `side` rows. float32 has none."""
    if dtype == torch.float32:
        return []
    in_scratch = (SmallConfig(side, *panel, warps, _STAGES_IN_SCRATCH, 0) for panel, warps in _IN_SCRATCH[side])
    on_chip = _ON_CHIP[side].get(target.capability // 10, ())
    return [*in_scratch, *(SmallConfig(side, *panel, warps, stages, 1) for panel, warps, stages in on_chip)]


def padded_side(m: int) -> int:
    """Return the first of `PADDED_SIDES` that is at least m. m must not exceed the last."""
    return next(side for side in PADDED_SIDES if side >= m)


def nearest(
    device_name: str,
    dtype: torch.dtype,
    m: int,
    k: int,
    kernel: str = "symmetric_gemm",
    among: Optional[Ranks] = None,
) -> Optional[dict]:
    """Return the entry measured here for exactly m x k, else the nearest shipped one; None if there is neither."""
    key, name = gpu_key(device_name), dtype_name(dtype)
    here = measured_here(key, Need(kernel, name, m, k), among)
    if here is not None and candidate_name(here.entry, kernel) not in failed(key, kernel, name):
        return here.entry
    return nearest_shipped(key, kernel, name, (m, k))


def launches_hopper_gemm(
    device: torch.device, dtype: torch.dtype, m: int, k: int, among: Optional[Ranks] = None
) -> bool:
    """Whether the compiled Hopper kernel is the fastest known symmetric product for m x k on this GPU."""
    known = exact_or_nearest(*measured_sizes(device, dtype, "symmetric_gemm", among), m, k)
    return known is not None and config_of(known.entry, Config) in COMPILED and is_built()
