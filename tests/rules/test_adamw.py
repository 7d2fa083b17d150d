"""What torch's fused AdamW is called with."""

from __future__ import annotations

import torch

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


def test_a_rate_reaches_torchs_kernel_as_that_reads_it(kernel):
    """On a device it reads float32 memory, whatever the tensor's dtype is; a tensor on the CPU it reads as a number."""
    as_kernels_take_it = kernel.rules.adamw._as_kernels_take_it
    exact = torch.tensor(0.1, dtype=torch.float64)
    assert as_kernels_take_it(0.1, ELSEWHERE) == 0.1
    assert all(as_kernels_take_it(exact, device) is exact for device in (CPU, ELSEWHERE))
    moved = as_kernels_take_it(exact.to(ELSEWHERE), ELSEWHERE)
    assert (moved.dtype, moved.device) == (torch.float32, ELSEWHERE)
