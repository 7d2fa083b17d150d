"""What is known of a size, as choices read it: how much faster one way was than another, and who measured it.

Constants to `torch.compile`: what is compiled keeps the choices of its time.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch

from .machine import gpu_of, key_of
from .measurement_file import JUDGED
from .measurements import failed, nearest_of, shipped_entries, sizes_here
from .predictions import WORTH, predicted_gain


class Circumstances(NamedTuple):
    """What a choice depends on besides the matrices."""

    differentiable: bool = False
    among: Optional[tuple[int, ...]] = None  # ranks that take the same choice, as `measurements.measured_here` has them


ALONE = Circumstances()


class Gain(NamedTuple):
    """Torch's time divided by the kernel's, and who says so; `gain` is None where nothing is known."""

    gain: Optional[float] = None
    source: str = ""


def gain_of(
    device: torch.device, dtype: torch.dtype, kernel: str, size: tuple[int, int], among: Optional[tuple[int, ...]]
) -> Gain:
    """Return what was measured of a kernel for a size: here, else what was shipped for the nearest one."""
    for m, k, gain, source in measured_sizes(device, dtype, kernel, among):
        if (m, k) == size:
            return Gain(gain, source)
    gain = nearest_of(_shipped_gains(device, dtype, kernel), *size)
    return Gain() if gain is None else Gain(gain, "shipped")


def predicted(device: torch.device, dtype: torch.dtype, m: int, k: int) -> Gain:
    """Return what the model says of the symmetric kernel, divided by the model's margin of error.

    It is not asked where a candidate of the kernel has failed its proof: there only what was proven counts.
    """
    gpu = gpu_of(device)
    if gpu is None or dtype not in (torch.float16, torch.bfloat16) or torch.version.hip:
        return Gain()
    gain = None if failed_here(device, dtype, "symmetric_gemm") else predicted_gain(gpu, m, k)
    return Gain() if gain is None else Gain(gain / WORTH, "by the model")


@torch.compiler.assume_constant_result
def measured_sizes(
    device: torch.device, dtype: torch.dtype, kernel: str, among: Optional[tuple[int, ...]]
) -> tuple[tuple[int, int, Union[float, str], str], ...]:
    """Return m, k, what was measured and its source of every size that counts here."""
    known = sizes_here(key_of(device), kernel, str(dtype).replace("torch.", ""), among)
    judged = JUDGED[kernel][0]
    return tuple((entry["m"], entry["k"], entry[judged], source) for entry, source in known)


@torch.compiler.assume_constant_result
def failed_here(device: torch.device, dtype: torch.dtype, kernel: str) -> tuple[str, ...]:
    """Return the candidates that have failed on this machine, which nothing takes."""
    return tuple(failed(key_of(device), kernel, str(dtype).replace("torch.", "")))


@torch.compiler.assume_constant_result
def _shipped_gains(device: torch.device, dtype: torch.dtype, kernel: str) -> tuple[tuple[int, int, float], ...]:
    """Return m, k and gain of every size that was shipped for this device."""
    if device.type != "cuda":
        return ()
    entries = shipped_entries(key_of(device), kernel, str(dtype).replace("torch.", ""))
    return tuple((entry["m"], entry["k"], entry["gain"]) for entry in entries)
