"""Batches that are orthogonalized in pieces, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    """Keeps the names of all operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_as_many_matrices_are_packed_as_fit_and_at_least_one(kernel):
    packed_together = kernel.polar.packing.packed_together
    assert [packed_together((24, 40), 4, most) for most in (1, 24 * 40 * 4, 3 * 24 * 40 * 4 - 1)] == [1, 1, 2]


@pytest.mark.parametrize("shape", [(6, 24, 40), (6, 40, 24)], ids=str)
def test_nothing_is_copied_on_a_cpu(kernel, monkeypatch, shape):
    """Neither a tall batch beforehand nor each piece of a batch afterwards.

    torch's threads would do that, and then look for more work on the cores that the products need.
    """
    monkeypatch.setattr(kernel.polar.packing, "_CORE_CACHE", 2 * 4 * 24 * 24 * 4)  # two matrices for each thread
    G = torch.randn(shape, generator=torch.Generator().manual_seed(10))
    expected = kernel.orthogonalize(G, dtype=torch.float32)
    with Called() as called:
        result = kernel.orthogonalize(G, dtype=torch.float32)
    assert torch.equal(result, expected)
    assert {"copy_", "clone", "_to_copy"}.isdisjoint(called.names)
    assert any(name.endswith(("mm", "newton_schulz_")) for name in called.names)
