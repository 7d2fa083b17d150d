"""Numbers that come from a device while the host goes on."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from tests.support.narrow_device import narrow_device

NUMBERS = [3, 1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_duplicate_has_the_numbers_that_were_on_their_way(portable_kernel, duplicate):
    """An event can be neither copied nor pickled, and an optimizer has such a copy between two steps."""
    with narrow_device(portable_kernel, "xpu") as narrow:
        numbers = torch.tensor(NUMBERS).to(narrow.device)
        made, another = (portable_kernel.kernels.host_copy.HostCopy(numbers) for _ in range(2))
        assert narrow.waits == 0
        other = duplicate(made)
        assert (made.is_known, other.is_known) == (False, True)
        assert made.read() == other.read() == another.read() == NUMBERS


@pytest.mark.parametrize(
    "source, target, waits",
    [
        *(("cpu", "cuda", False), ("pinned", "cuda", True), ("cpu", "xpu", True), ("pinned", "xpu", True)),
        *(("cpu", "cpu", True), ("cuda", "cpu", True), ("cuda", "cuda", False), ("xpu", "xpu", False)),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_the_host_waits_for_what_it_reads_and_for_those_who_read_its_memory_later(kernel, source, target, waits, dtype):
    """CUDA reads ordinary memory at once."""
    values = SimpleNamespace(
        is_cpu=source in ("cpu", "pinned"),
        is_pinned=lambda: source == "pinned",
        to=lambda device, dtype, non_blocking: (device.type, dtype, non_blocking),
    )
    assert kernel.kernels.host_copy.moved(values, torch.device(target), dtype) == (target, dtype, not waits)


def test_numbers_of_the_host_are_known_at_once(kernel):
    made = kernel.kernels.host_copy.HostCopy(torch.tensor(NUMBERS, device="cpu"))
    assert made.is_known and made.read() == NUMBERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="waiting is a GPU's")
def test_making_a_copy_does_not_wait_for_the_gpu(kernel):
    numbers = torch.tensor(NUMBERS, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = kernel.kernels.host_copy.HostCopy(numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not made.is_known and made.read() == NUMBERS
