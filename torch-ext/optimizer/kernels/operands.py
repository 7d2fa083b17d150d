"""Requirements on the operands of a symmetric product, and how they are laid out in memory."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .portable.memory import extent

# What Triton's kernels multiply: float64 is not among it.
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_operands(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor) -> None:
    """Raise ValueError unless A (b, m, k), B (b, k, m), D and C (b, m, m) fit each other.

    All must have one dtype, of `TRITON_DTYPES`, and one device. C must share no storage with A, B or D, and must not
    have two entries at one address.
    """
    device = device_of(A)
    square = (*A.shape[:1], *A.shape[1:2], *A.shape[1:2])
    wanted = {"B": (B, (*A.shape[:1], *A.shape[:0:-1])), "D": (D, square), "C": (C, square)}
    if A.ndim != 3 or A.dtype not in TRITON_DTYPES:
        raise ValueError(f"A must be (b, m, k) in {', '.join(map(str, TRITON_DTYPES))}, got {tuple(A.shape)} {A.dtype}")
    for name, (x, shape) in wanted.items():
        if x is not None and (tuple(x.shape) != shape or x.dtype != A.dtype or device_of(x) != device):
            raise ValueError(
                f"{name} must be {shape} {A.dtype} on {device}, got {tuple(x.shape)} {x.dtype} on {device_of(x)}"
            )
    if not extent(C).distinct:
        raise ValueError(f"C must have a place for each entry, got {tuple(C.shape)} with strides {C.stride()}")
    if any(x is not None and torch._C._is_alias_of(x, C) for x in (A, B, D)):
        raise ValueError("C must not share its storage with A, B or D, which are read while it is written")


def device_of(x: Tensor) -> torch.device:
    """Return the device of a tensor. A traced one says meta while an operation is asked for its result."""
    return getattr(x, "fake_device", x.device)


def fits_descriptor(panel: Tensor) -> bool:
    """Whether a non-empty panel (b, m, k), or its transpose, has inner stride 1 and the rest aligned to 16 bytes."""
    panel = panel if panel.stride(2) == 1 else panel.mT
    outer = [stride * panel.element_size() for stride in panel.stride()[:2]]
    outer_fits = all(n % 16 == 0 and n > 0 for n in outer)
    return panel.numel() > 0 and panel.stride(2) == 1 and panel.data_ptr() % 16 == 0 and outer_fits


def is_aligned(*tensors: Tensor) -> bool:
    """Whether addresses are aligned to 16 bytes, an inner stride is 1, and other strides and sizes divide by 16."""
    return all(
        x.data_ptr() % 16 == 0
        and 1 in x.stride()[1:]
        and all(n == 1 or n % 16 == 0 for n in (*x.stride(), *x.shape[1:]))
        for x in tensors
    )
