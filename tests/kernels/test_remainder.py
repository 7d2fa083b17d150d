"""A bfloat16 parameter and its remainder descend together as a float32 parameter does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.operation_places import on_every_place

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]

SHAPES = (17, 5), (0, 9), (130, 70), (1, 1), (3, 5000)
LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.clone().mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x, x], 1)[:, x.size(1) : 2 * x.size(1)],
    "every_other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.fixture(scope="session")
def formula(kernel):
    return kernel.kernels.master_weights


def random(shape, seed: int, dtype=torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def halves_of(formula, master: Tensor) -> tuple[Tensor, Tensor]:
    parameter, remainder = (torch.empty(master.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    formula.split_(parameter, remainder, master)
    return parameter, remainder


def numbers(*values) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def edges() -> Tensor:
    """Every float32 whose lower half is an edge: all upper halves, with infinities, NaNs and subnormal numbers."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)[:, None] << 16
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    return (upper + lower).view(torch.float32)


@pytest.mark.kernels_ci
@pytest.mark.many_blocks
def test_the_compiled_formula_is_the_one_in_python(descend_, formula):
    """A step of size 0 joins and splits; both leave every number's bits as they were, and a NaN a NaN."""
    values = edges()
    bits = torch.randint(-(2**31), 2**31, (1 << 12, 64), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for master in values, bits.to(torch.int32).to(values.device).view(torch.float32):
        parameter, remainder = halves_of(formula, master)
        expected = parameter.clone(), remainder.clone()
        descend_([parameter], torch.zeros(1, *master.shape), *numbers(0.0, 0.0, 1.0), remainder=[remainder])
        assert torch.equal(parameter.isnan(), master.isnan()) and torch.equal(remainder, expected[1])
        same = parameter.view(torch.int16) == expected[0].view(torch.int16)
        assert (same | master.isnan()).all()


@pytest.mark.kernels_ci
def test_a_parameter_that_somebody_else_wrote_is_joined_as_in_python(descend_, formula):
    """Beside a zero or an infinity some remainders cannot be of that number: they are ignored, and leave no NaN."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    lower = torch.tensor([-0x8000, -0x7FFF, -1, 0, 1, 0x7FFF], dtype=torch.int32).to(torch.int16)
    parameter, remainder = (x.contiguous() for x in (upper.expand(-1, len(lower)), lower.expand(len(upper), -1)))
    expected = halves_of(formula, formula.joined(parameter, remainder))
    was_nan = parameter.isnan()
    descend_([parameter], torch.zeros(1, *parameter.shape), *numbers(0.0, 0.0, 1.0), remainder=[remainder])
    assert torch.equal(parameter.isnan(), was_nan) and torch.equal(remainder, expected[1])
    assert torch.equal(parameter.view(torch.int16)[~was_nan], expected[0].view(torch.int16)[~was_nan])


@pytest.mark.parametrize("decay_mode", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(130, 70), (136, 72)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_have_the_bits_of_a_float32_parameter(descend_, formula, layout, shape, dtype, decay_mode):
    """Over three steps, whatever the strides of parameter, remainder and update."""
    master, turned = random(shape, 0), LAYOUTS[layout]
    for parameter_layout, remainder_layout in ((turned, turned), (turned, torch.clone), (torch.clone, turned)):
        upper, lower = halves_of(formula, master)
        parameter, remainder, expected = parameter_layout(upper), remainder_layout(lower), master.clone()
        for step in range(3):
            update, scalars = turned(random(shape, 1 + step, dtype))[None], numbers(0.02, 0.1, 1.5)
            descend_([parameter], update, *scalars, decay_mode, remainder=[remainder])
            descend_([expected], update, *scalars, decay_mode)
        assert torch.equal(formula.joined(parameter, remainder), expected)
        assert torch.equal(halves_of(formula, expected)[0], parameter)


@pytest.mark.parametrize("moved", ["parameter", "remainder"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_each_half_may_start_between_the_places_of_wide_accesses(descend_, formula, layout, moved):
    """One element behind such a place, where the other half, whose lines have whole accesses, starts at one."""
    master, update = random((136, 72), 0), LAYOUTS[layout](random((136, 72), 1))[None]
    halves = dict(zip(("parameter", "remainder"), halves_of(formula, master)))
    half = halves[moved]
    halves[moved] = half.new_empty(1 + half.numel())[1:].view(half.shape).copy_(half)
    descend_([halves["parameter"]], update, *numbers(0.02, 0.1, 1.5), remainder=[halves["remainder"]])
    descend_([master], update, *numbers(0.02, 0.1, 1.5))
    assert torch.equal(formula.joined(*halves.values()), master)


def test_a_list_of_shapes_takes_every_option(descend_, formula):
    """Offsets, factors of rows, and matrices that are left alone."""
    masters = [random(shape, i) for i, shape in enumerate(SHAPES)]
    sizes = [master.numel() for master in masters]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    options = {
        "offsets": offsets,
        "row_scale": random(sum(rows for rows, _ in SHAPES), 9).abs(),
        "active": torch.tensor([True, True, True, False, True]),
    }
    update, halves = random(sum(sizes), 7), [halves_of(formula, master) for master in masters]
    remainders = [remainder for _, remainder in halves]
    descend_([parameter for parameter, _ in halves], update, *numbers(0.1, 0.2, 1.0), **options, remainder=remainders)
    expected = [master.clone() for master in masters]
    descend_(expected, update, *numbers(0.1, 0.2, 1.0), **options)
    assert all(torch.equal(formula.joined(*pair), master) for pair, master in zip(halves, expected))
    assert torch.equal(expected[3], masters[3]) and not torch.equal(expected[2], masters[2])


@pytest.mark.kernels_ci
def test_an_overflow_changes_neither_half(descend_, formula):
    master = random((17, 40), 0)
    halves = halves_of(formula, master)
    overflow = torch.ones(1)
    descend_([halves[0]], random((1, 17, 40), 1), *numbers(0.1, 0.2, 1.0), found_inf=overflow, remainder=[halves[1]])
    assert torch.equal(formula.joined(*halves), master)


@pytest.mark.kernels_ci
def test_a_number_beyond_bfloat16_comes_back(descend_, formula):
    """Its parameter is infinite, as a cast would make it, and its master is not."""
    largest = torch.full((2, 3), torch.finfo(torch.float32).max)
    parameter, remainder = halves_of(formula, largest)
    assert parameter.isinf().all()
    descend_([parameter], 0.5 * largest[None], *numbers(1.0, 0.0, 1.0), remainder=[remainder])
    assert torch.equal(formula.joined(parameter, remainder), 0.5 * largest)
    assert parameter.isfinite().all()
