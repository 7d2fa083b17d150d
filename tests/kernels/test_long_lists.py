"""Lists of more matrices than one launch of a GPU holds: each gets its own numbers, gate, seed and place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import oracles
from tests.support.operation_places import on_every_place
from tests.support.symmetric_products import normal

COUNT = 300  # a launch takes 128
SHAPES = [(i % 3, 4) if i % 7 == 0 else (1 + i % 5, 1 + i % 9) for i in range(COUNT)]  # some without rows

FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]


def matrices(dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, device="cpu") for shape in SHAPES]
    return [x.to(torch.get_default_device(), dtype) for x in drawn]


def scattered_offsets() -> tuple[list[int], int]:
    """The places of the matrices in a buffer, the last one first and with gaps, and the buffer's size."""
    sizes = [rows * cols + 3 for rows, cols in SHAPES]
    return [sum(sizes[i + 1 :]) for i in range(COUNT)], sum(sizes)


def assert_close(actual: Tensor, exact: Tensor, computing: Tensor, spacings: float) -> None:
    allowed = computing + 2 * spacings * oracles.rounding_error(exact, actual.dtype)
    assert ((actual.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("numbers", ["cpu", "device"])
def test_long_list_packs_each_matrix_by_the_formula(native, device, numbers):
    momentum, gradient = matrices(torch.float32, 0), matrices(torch.bfloat16, 1)
    before, active = [m.clone() for m in momentum], torch.arange(COUNT) % 3 != 1
    offsets, size = scattered_offsets()
    packed, outside = torch.full((size,), 3.0, dtype=torch.float16), torch.ones(size, dtype=torch.bool)
    mask = active.to("cpu" if numbers == "cpu" else device)
    native.momentum_pack_(momentum, gradient, packed, 0.95, True, offsets=offsets, active=mask)
    for i, (m, g) in enumerate(zip(before, gradient)):
        part = slice(offsets[i], offsets[i] + m.numel())
        exact = oracles.momentum_pack(m, g, 0.95, True) if active[i] else (m.double(), torch.zeros_like(m).double())
        computing = 8 * oracles.unit_roundoff(m.dtype) * (m.double().abs() + g.double().abs())
        assert_close(momentum[i], exact[0], computing, 0.5)
        assert_close(packed[part].view(m.shape), exact[1], computing, 0.5)
        assert active[i] or torch.equal(momentum[i], m)
        outside[part] = False
    assert (packed[outside] == 3).all()


@pytest.mark.parametrize("numbers", ["cpu", "device"])
def test_long_list_descends_each_parameter_by_own_numbers(native, device, numbers):
    """Stochastic rounding goes to a neighbour, less than a spacing away, and to the one it goes to without the list."""
    parameter, update = matrices(torch.bfloat16, 0), matrices(torch.float32, 1)
    alone, before = [p.clone() for p in parameter], [p.clone() for p in parameter]
    offsets, size = scattered_offsets()
    flat = torch.full((size,), torch.nan)
    for u, offset in zip(update, offsets):
        flat[offset : offset + u.numel()] = u.flatten()
    rates = torch.rand(3, COUNT, generator=torch.Generator().manual_seed(2), device="cpu", dtype=torch.float64)
    active, seeds = torch.arange(COUNT) % 3 != 1, torch.arange(COUNT) ** 2
    all_numbers = [x.to("cpu" if numbers == "cpu" else device) for x in (*rates, active, seeds)]
    native.descend_(parameter, flat, *all_numbers[:3], offsets=offsets, active=all_numbers[3], seeds=all_numbers[4])
    for i in range(COUNT):
        numbers_of_one = [x[i : i + 1] for x in all_numbers]
        native.descend_([alone[i]], update[i][None], *numbers_of_one[:3], seeds=numbers_of_one[4])
        exact = oracles.descend(before[i], update[i], *rates[:, i].tolist())
        computing = 4 * oracles.unit_roundoff(torch.float32) * (before[i].double().abs() + update[i].double().abs())
        if active[i]:
            assert_close(parameter[i], exact, computing, 1)
            assert torch.equal(parameter[i], alone[i])
        else:
            assert torch.equal(parameter[i], before[i])


@pytest.mark.parametrize("packed_as", FLOATS, ids=str)
@pytest.mark.parametrize("stored", FLOATS, ids=str)
def test_every_device_gives_the_bits_of_the_cpu(native, device, stored, packed_as):
    """One formula, whose added products are fma everywhere; matrices lie one behind the other in the buffer."""
    shapes = (130, 70), (3, 900), (1, 1)
    momentum, gradient = ([normal(*s, seed=seed + i).to(stored) for i, s in enumerate(shapes)] for seed in (0, 10))
    sizes = [x.numel() for x in momentum]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    numbers = [torch.tensor(x, dtype=torch.float64, device="cpu") for x in (0.02, 0.1, 1.5)]
    seeds = {} if stored.itemsize > 2 else {"seeds": torch.arange(3, device="cpu")}
    results = []
    for place in ("cpu", device):
        kept, gradients = ([x.clone().to(place) for x in group] for group in (momentum, gradient))
        packed = torch.full((sum(sizes),), torch.nan, dtype=packed_as, device=place)
        native.momentum_pack_(kept, gradients, packed, 0.95, True, offsets=offsets)
        stepped = [x.clone() for x in kept]
        native.descend_(stepped, packed, *numbers, 2, offsets=offsets, **seeds)
        results.append([x.cpu() for x in (*kept, packed, *stepped)])
    assert all(torch.equal(x, y) for x, y in zip(*results))
