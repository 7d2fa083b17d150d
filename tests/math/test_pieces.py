"""Batches that are orthogonalized in pieces, on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


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
    one = 24 * 40 * 4
    assert [packed_together((24, 40), 4, most) for most in (1, one, 2 * one, 3 * one - 1)] == [1, 1, 2, 2]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("method, dtype", [("standard", torch.float32), ("gram_float32", torch.float16)])
def test_a_cpu_works_on_as_many_matrices_as_its_caches_hold(kernel, method, dtype, threads):
    """Each thread on those whose four squares fit into its core's cache, on one at least.

    Those that are too long for one core come one at a time.
    """
    packing, schedule = kernel.polar.packing, kernel.schedules.resolve_schedule("polar_express", 5)
    torch.set_num_threads(threads)
    for m, n in ((8, 8), (64, 64), (64, 1024), (362, 362), (600, 600), (64, 2**15), (2048, 2048)):
        iteration = kernel.iteration.choose_iteration(CPU, dtype, (m, n), schedule, method)
        together, squares = packing.matrices_together(CPU, (m, n), iteration), 4 * m * m * torch.float32.itemsize
        if kernel.kernels.native_products.fits_a_core(m, n, torch.float32.itemsize):
            each, rest = divmod(together, threads)
            assert rest == 0 and packing._CORE_CACHE < (each + 1) * squares
            assert each == 1 or 1 < each <= packing._CORE_CACHE / squares
        else:
            assert together == 1


def test_what_is_known_of_nvidias_gpus_says_nothing_of_amds(kernel, monkeypatch):
    """A capability of 9.0 is there, too, but of a GPU with other rates: it counts as one that nothing is known of."""
    packing, schedule = kernel.polar.packing, kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(CPU, torch.float16, (768, 768), schedule, "gram")
    together = partial(packing.matrices_together, torch.device("cuda", 0), (768, 768), iteration)
    unknown = together()
    monkeypatch.setattr(packing, "gpu_of", lambda device: kernel.kernels.speeds.predictions.Gpu(90, 132, 50 * 2**20))
    assert together() > unknown
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert together() == unknown


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


@pytest.mark.parametrize("rooms", [3, 5])
@pytest.mark.parametrize("table", ["NATIVE", "NATIVE_SYMMETRIC"])
def test_room_for_squares_may_be_longer_than_a_piece(kernel, monkeypatch, table, rooms):
    """Five matrices in pieces of at most three are two and three; there may be room for three, or for all."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    circumstances = kernel.kernels.circumstances.Circumstances(table=table)
    iteration = kernel.iteration.choose_iteration(CPU, torch.float32, (24, 40), schedule, "standard", circumstances)
    G = torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(11))
    polar_factors, out = kernel.polar.factors.polar_factors, torch.empty_like(G)
    expected = polar_factors(G, iteration, 1e-7)
    monkeypatch.setattr(kernel.polar.factors, "matrices_together", lambda *_: 3)
    count, dtype = iteration.squares
    polar_factors(G, iteration, 1e-7, out, squares=[torch.empty(rooms, 24, 24, dtype=dtype) for _ in range(count)])
    assert torch.equal(out, expected)
