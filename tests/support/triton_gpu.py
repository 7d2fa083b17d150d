"""Where Triton's kernels are tried: on no GPU on which the package launches none of them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

UNSUPPORTED = "Triton does not support this GPU, and the package launches none of its kernels there"


def skip_without_triton(kernel: ModuleType, device: str) -> None:
    """Skip a test that launches Triton's kernels if its device is a GPU that Triton does not support."""
    if device == "cuda" and not kernel.kernels.speeds.machine.supports_triton(torch.device(device)):
        pytest.skip(UNSUPPORTED)
