"""Products in the dtypes that they are given, whatever `torch.autocast` says around them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context in which products on this device keep their dtypes.

    Autocast would have float32 and float16 products made in bfloat16, in which the Gram iteration diverges.
    """
    return torch.autocast(device_type, enabled=False) if _has_autocast(device_type) else nullcontext()


@torch.compiler.assume_constant_result
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)
