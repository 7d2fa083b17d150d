"""The launch configurations that compete on a GPU. They are few, because compiling each of them takes seconds."""

from __future__ import annotations

from typing import Iterable

import torch

from ..kernels.formats import dtype_name
from ..kernels.gpu.hopper_gemm import is_built
from ..kernels.gpu.tuned import (
    COMPILED,
    Config,
    SmallConfig,
    config_of,
    padded_side,
    safe_config,
    safe_small_config,
    target_of,
    usual_configs,
    usual_small_configs,
)
from ..kernels.products import symmetric_gemm
from ..kernels.speeds.machine import key_of
from ..kernels.speeds.measurements import shipped_entries


def product_configs(device: torch.device, dtype: torch.dtype, m: int) -> list[Config]:
    """Return the symmetric product's configurations to try for results of m rows: safe, shipped and usual ones.

    If the compiled Hopper product runs on this device, it comes after the safe one, in each number of sections: others
    take seconds to compile, after which a budget may have no room for more.
    """
    target = target_of(device)
    safe = safe_config(target, dtype, m, symmetric_gemm.reads_descriptors(device), True)
    others = [*_shipped(device, dtype, "symmetric_gemm", Config), *usual_configs(target, dtype)]
    others.sort(key=lambda config: config not in COMPILED)
    return _distinct(config for config in [safe, *others] if config not in COMPILED or is_built())


def small_configs(device: torch.device, dtype: torch.dtype, m: int) -> list[SmallConfig]:
    """Return the configurations to try for small matrices of m rows: safe, shipped and usual ones."""
    side, target = padded_side(m), target_of(device)
    known = [config for config in _shipped(device, dtype, "small_polar", SmallConfig) if config.side == side]
    return _distinct([safe_small_config(target, dtype, m), *known, *usual_small_configs(target, dtype, side)])


def _shipped(device: torch.device, dtype: torch.dtype, kernel: str, kind: type) -> list:
    return [config_of(entry, kind) for entry in shipped_entries(key_of(device), kernel, dtype_name(dtype))]


def _distinct(configs: Iterable) -> list:
    return list(dict.fromkeys(configs))
