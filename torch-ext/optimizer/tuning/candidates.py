"""The launch configurations that compete on a GPU. They are few, because compiling each of them takes seconds."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

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
from ..kernels.speeds.measurements import nearest_shipped, shipped_entries


def product_configs(device: torch.device, dtype: torch.dtype, size: tuple[int, int]) -> list[Config]:
    """Return the symmetric product's configurations to try for `size`, (m, k): first the one that is launched untuned.

    The compiled Hopper product, if this device runs it, comes before what Triton compiles, in each number of sections:
    that takes seconds each, after which a budget may have no room for more.
    """
    target = target_of(device)
    safe = safe_config(target, dtype, size[0], symmetric_gemm.reads_descriptors(device), True)
    shipped = _shipped(device, dtype, "symmetric_gemm", Config, size)
    others = sorted([*shipped, *usual_configs(target, dtype)], key=lambda config: config not in COMPILED)
    return _launched_first(shipped, safe, others, lambda config: config not in COMPILED or is_built())


def small_configs(device: torch.device, dtype: torch.dtype, size: tuple[int, int]) -> list[SmallConfig]:
    """Return the configurations to try for small matrices of `size`, (m, n): first the one that is launched untuned."""
    side, target = padded_side(size[0]), target_of(device)
    safe, shipped = safe_small_config(target, dtype, size[0]), _shipped(device, dtype, "small_polar", SmallConfig, size)
    others = [*shipped, *usual_small_configs(target, dtype, side)]
    return _launched_first(shipped, safe, others, lambda config: config.side == side)


def _shipped(device: torch.device, dtype: torch.dtype, kernel: str, kind: type, size: tuple[int, int]) -> list:
    """Return the shipped configurations, the one that was measured nearest to `size` first."""
    of = key_of(device), kernel, dtype_name(dtype)
    nearest = nearest_shipped(*of, size)
    return [] if nearest is None else [config_of(entry, kind) for entry in (nearest, *shipped_entries(*of))]


def _launched_first(shipped: Sequence, safe: Any, others: Iterable, fits: Callable[[Any], bool]) -> list:
    """Return those that fit, each once. Untuned, the nearest shipped one is launched if it fits, else the safe one."""
    return list(dict.fromkeys(filter(fits, [*shipped[:1], safe, *others])))
