"""Formats of numbers that the operations share with what calls them."""

from __future__ import annotations

import torch

from .tracing import constant_while_traced

# Parameters of these dtypes may be rounded stochastically.
HALVES = (torch.float16, torch.bfloat16)

# Neighbours that share a scale in momentum of 8 bits: kBlock of the compiled operations.
BLOCK = 64


@constant_while_traced
def exact_dtype(device: torch.device, wanted: torch.dtype = torch.float64) -> torch.dtype:
    """Return `wanted`, or float32 where that is float64 and the device has none: on Apple's and on some Intel GPUs.

    What is computed in float64 on other devices is computed in this dtype: norms, and numbers such as lr * multiplier.
    """
    return torch.float32 if wanted == torch.float64 and not _has_float64(device) else wanted


def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu" and torch.xpu.is_available():  # without one, tensors of that device are fake
        return torch.xpu.get_device_properties(device).has_fp64
    return device.type != "mps"
