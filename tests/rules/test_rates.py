"""How rates in tensors reach kernels: where they are read, in which dtype, and when."""

from __future__ import annotations

import torch

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
EXACT = torch.tensor(0.1, dtype=torch.float64)


def test_a_rate_reaches_torchs_adamw_as_that_reads_it(kernel):
    """On a device it reads float32 memory, whatever the tensor's dtype is; a tensor on the CPU it reads as a number."""
    as_kernels_take_it = kernel.rules.adamw._as_kernels_take_it
    assert as_kernels_take_it(0.1, ELSEWHERE) == 0.1
    assert all(as_kernels_take_it(EXACT, device) is EXACT for device in (CPU, ELSEWHERE))
    moved = as_kernels_take_it(EXACT.to(ELSEWHERE), ELSEWHERE)
    assert (moved.dtype, moved.device) == (torch.float32, ELSEWHERE)


def test_only_cuda_reads_the_memory_of_a_copy_at_once(kernel):
    """Elsewhere a copy that is not waited for may read it when somebody has freed or changed it."""
    read_at_once = kernel.kernels.host_copy.read_at_once
    assert read_at_once(EXACT, torch.device("cuda", 0))
    assert not any(read_at_once(EXACT, torch.device(kind)) for kind in ("cpu", "mps", "xpu"))
    assert not read_at_once(EXACT.to(ELSEWHERE), torch.device("cuda", 0))
