"""Products that keep the dtypes of their operands inside `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .tracing import constant_while_traced


def without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context in which products on this device keep their dtypes.

    Autocast would compute float32 and float16 products in bfloat16, and with that the Gram iteration diverges.
    """
    return torch.autocast(device_type, enabled=False) if _has_autocast(device_type) else nullcontext()


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for this device. Callers that are never traced need no context if it is off."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


@constant_while_traced
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)
