"""Formats of numbers that the operations and their callers share."""

from __future__ import annotations

import torch
from torch import Tensor

from .tracing import constant_while_traced

# Floating-point dtypes of 16 bits. Parameters in them may be rounded stochastically.
HALF_DTYPES = (torch.float16, torch.bfloat16)

# The classes of plain tensors. Others may have no memory, or none that this process may look at.
PLAIN_CLASSES = frozenset((Tensor, torch.nn.Parameter))

# Neighbours that share a scale in momentum of 8 bits: kMomentumBlock of the compiled operations.
BLOCK = 64

# The unit roundoff of the formats to which `torch.set_float32_matmul_precision` lets torch round the factors of float32
# products.
_ROUNDOFFS = {"tf32": 2.0**-11, "bf16": 2.0**-8}


def blocks_of(count: int) -> int:
    """Return how many blocks `count` neighbours have; the last one may be shorter."""
    return -(-count // BLOCK)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, such as `float16`."""
    return str(dtype).replace("torch.", "")


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, but not by its class: nothing on this floor knows of other processes."""
    return hasattr(tensor, "full_tensor")


def shown(tensor: Tensor) -> str:
    """Return what errors show of a tensor: its shape and dtype, and its layout if it is not dense."""
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{layout}"


def unnormalized_dtype(work_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of directions that are not normalised yet: float16 would overflow at 1e5, float32 at 1e60."""
    return torch.float32 if work_dtype == torch.float16 else work_dtype


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number of `dtype`."""
    return torch.finfo(dtype).eps / 2


@constant_while_traced
def float32_roundoffs() -> tuple[float, float]:
    """Return the relative rounding of factors in torch's float32 products on CUDA devices, and on all others."""
    settings = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    on_cuda, elsewhere = (_ROUNDOFFS.get(setting, unit_roundoff(torch.float32)) for setting in settings)
    return on_cuda, elsewhere


@constant_while_traced
def torch_is_slow(dtype: torch.dtype) -> bool:
    """Return whether this CPU lacks the instructions by which torch multiplies a half-precision dtype fast.

    False where torch does not say, as in builds without oneDNN.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype, "")
    has_instructions = getattr(torch.ops.mkldnn, name, None) if name else None
    return has_instructions is not None and not has_instructions()


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
