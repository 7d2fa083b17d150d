"""Numbers on their way between a device and host memory, for which nobody waits before they are read."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor


class HostCopy:
    """A copy of some numbers in host memory, which is on its way when this is made; `read` waits for it alone.

    Not for steps that are captured in a CUDA graph. A duplicate by `copy` or `pickle` has the numbers.
    """

    def __init__(self, numbers: Tensor):
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._copied: Optional[torch.Event] = None
        if numbers.device.type != "cpu":
            self._copied = torch.Event(numbers.device)
            self._copied.record(torch.accelerator.current_stream(numbers.device))  # another GPU may be the current one

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return {"_numbers": self._numbers, "_copied": None}

    @property
    def is_known(self) -> bool:
        """Whether the numbers can be read without waiting for a device."""
        return self._copied is None

    def read(self) -> list:
        """Return the numbers once they have arrived."""
        self._wait()
        return self._numbers.tolist()

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def moved(values: Tensor, device: torch.device, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Return `values` on `device`; the host waits where that is the CPU, or may read the CPU's memory later."""
    need_not_wait = read_at_once(values, device) if values.is_cpu else device.type != "cpu"
    return values.to(device, dtype, non_blocking=need_not_wait)


def read_at_once(value: Tensor, device: torch.device) -> bool:
    """Whether a copy to `device` that is not waited for has read `value` when the call returns.

    CUDA reads ordinary memory at once, and pinned memory later. Other devices may read both later.
    """
    return device.type == "cuda" and value.is_cpu and not value.is_pinned()
