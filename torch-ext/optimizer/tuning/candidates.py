"""The launch configurations that compete on a GPU. They are few, because compiling each of them takes seconds."""

from __future__ import annotations

from typing import Iterable

import torch

from ..kernels.hopper_gemm import is_built
from ..kernels.machine import key_of
from ..kernels.measurements import shipped_entries
from ..kernels.products import symmetric_gemm
from ..kernels.tuned import (
    HOPPER,
    Config,
    SmallConfig,
    padded_side,
    safe_config,
    safe_small_config,
    target_of,
    usual_small_configs,
)

# (tile, tile_k, warps, stages) that fit into a target, some with a spilled register or two. The lab tries more of them.
_HOPPER = ((128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3), (64, 64, 4, 4), (64, 128, 4, 3))
_OTHERS = ((128, 32, 8, 3), (128, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 3))
_HIP = ((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2))
_GROUP = 8


def product_configs(device: torch.device, dtype: torch.dtype, m: int) -> list[Config]:
    """Return the symmetric product's configurations to try for results of m rows: safe, shipped and usual ones.

    If the compiled Hopper product runs on this device, it is one of them.
    """
    target = target_of(device)
    if target.backend == "hip":
        shapes = _HIP
    else:
        shapes = _HOPPER if 90 <= target.capability < 120 else _OTHERS
    safe = safe_config(target, dtype, m, symmetric_gemm.reads_descriptors(device), True)
    usual = [Config(tile, tile_k, _GROUP, *rest) for tile, tile_k, *rest in shapes]
    usual += [HOPPER] if target == symmetric_gemm.HOPPERS else []
    every = [safe, *_shipped(device, dtype, "symmetric_gemm", Config), *(usual if dtype.itemsize < 4 else [])]
    return _distinct(config for config in every if config != HOPPER or is_built())


def small_configs(device: torch.device, dtype: torch.dtype, m: int) -> list[SmallConfig]:
    """Return the configurations to try for small matrices of m rows: safe, shipped and usual ones."""
    side, target = padded_side(m), target_of(device)
    known = [config for config in _shipped(device, dtype, "small_polar", SmallConfig) if config.side == side]
    return _distinct([safe_small_config(target, dtype, m), *known, *usual_small_configs(target, dtype, side)])


def _shipped(device: torch.device, dtype: torch.dtype, kernel: str, kind: type) -> list:
    entries = shipped_entries(key_of(device), kernel, str(dtype).replace("torch.", ""))
    return [kind(*(entry[field] for field in kind._fields)) for entry in entries]


def _distinct(configs: Iterable) -> list:
    return list(dict.fromkeys(configs))
