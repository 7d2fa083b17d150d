"""How much faster one way of multiplying is than another for a given size, and who measured it.

`torch.compile` treats the results as constants: a compiled function keeps the choices made when it was compiled.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from ..formats import HALF_DTYPES, dtype_name
from ..tracing import constant_while_traced
from .machine import gpu_of, key_of
from .measurements import Known, Ranks, Sized, exact_or_nearest, failed, shipped_entries, sizes_here
from .predictions import WORTH, predicted_gain


class Gain(NamedTuple):
    """Torch's time divided by the kernel's, and who says so; `gain` is None if nothing is known."""

    gain: Optional[float] = None
    source: str = ""


def gain_of(
    device: torch.device, dtype: torch.dtype, kernel: str, size: tuple[int, int], among: Optional[Ranks]
) -> Gain:
    """Return the measured gain of a kernel for a size: measured here, else the nearest shipped one."""
    known = exact_or_nearest(*measured_sizes(device, dtype, kernel, among), *size)
    return Gain() if known is None else Gain(known.entry["gain"], known.source)


def predicted(device: torch.device, dtype: torch.dtype, m: int, k: int) -> Gain:
    """Return the model's gain of the symmetric kernel, divided by the model's margin of error.

    If a candidate of the kernel has failed its proof here, the model is not used: then only proven candidates count.
    """
    gpu = gpu_of(device)
    if gpu is None or dtype not in HALF_DTYPES or torch.version.hip or failed_here(device, dtype, "symmetric_gemm"):
        return Gain()
    gain = predicted_gain(gpu, m, k)
    return Gain() if gain is None else Gain(gain / WORTH, "by the model")


@constant_while_traced
def measured_sizes(
    device: torch.device, dtype: torch.dtype, kernel: str, among: Optional[Ranks]
) -> tuple[Sized, Sized]:
    """Return m, k and `Known` of every size whose measurement here counts, and of those that are shipped for a GPU."""
    of = key_of(device), kernel, dtype_name(dtype)
    shipped = shipped_entries(*of) if device.type == "cuda" else ()
    here_and_shipped = sizes_here(*of, among), [Known(entry, "shipped") for entry in shipped]
    return tuple(tuple((each.entry["m"], each.entry["k"], each) for each in known) for known in here_and_shipped)


@constant_while_traced
def failed_here(device: torch.device, dtype: torch.dtype, kernel: str) -> tuple[str, ...]:
    """Return the candidates that have failed on this machine. They are never chosen."""
    return tuple(failed(key_of(device), kernel, dtype_name(dtype)))
