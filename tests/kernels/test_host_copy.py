"""Numbers that come from a device while the host goes on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.support.narrow_device import narrow_device

NUMBERS = [3, 1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_duplicate_has_the_numbers_that_were_on_their_way(portable_kernel, duplicate):
    """An event can be neither copied nor pickled, and an optimizer has such a copy between two steps."""
    with narrow_device(portable_kernel, "xpu") as narrow:
        made = portable_kernel.kernels.host_copy.HostCopy(torch.tensor(NUMBERS).to(narrow.device))
        other = duplicate(made)
        assert (made.is_known, other.is_known) == (False, True)
        assert made.read() == other.read() == NUMBERS


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
