"""A float32 number and its two halves: the nearest bfloat16, and what is left, from which the number comes back."""

import pytest
import torch

pytestmark = [pytest.mark.kernels_ci, pytest.mark.usefixtures("device")]

LARGEST = torch.finfo(torch.bfloat16).max


@pytest.fixture(scope="module")
def formula(kernel):
    return kernel.kernels.master_weights


def split(formula, master):
    parameter, remainder = (torch.empty(master.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    formula.split_(parameter, remainder, master)
    return parameter, remainder


def every_lower_half(upper):
    """All numbers whose bits begin with these 16."""
    return ((upper << 16) + torch.arange(1 << 16, dtype=torch.int32)).view(torch.float32)


# Zeros, subnormal numbers, the smallest normal ones, 1 and its neighbours, the largest, infinities and NaNs.
UPPERS = (0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x4000, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)


@pytest.mark.parametrize("sign", [0, -0x8000], ids=["+", "-"])
@pytest.mark.parametrize("upper", UPPERS, ids=hex)
def test_every_number_comes_back_with_its_bits(formula, upper, sign):
    master = every_lower_half(upper + sign)
    joined = formula.joined(*split(formula, master))
    is_nan = master.isnan()
    assert torch.equal(joined.isnan(), is_nan)
    assert torch.equal(joined.view(torch.int32)[~is_nan], master.view(torch.int32)[~is_nan])


@pytest.mark.parametrize("sign", [0, -0x8000], ids=["+", "-"])
@pytest.mark.parametrize("upper", [0, 1, 0x7F, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F], ids=hex)
def test_the_parameter_is_the_nearest_bfloat16(formula, upper, sign):
    """Of two that are as near the larger one; beyond the largest infinity stands for the next."""
    master = every_lower_half(upper + sign).double()
    parameter = split(formula, master.float())[0].double()
    lower, higher = (every_lower_half(upper + i)[0].double() for i in (0, 1))
    higher = higher if higher.isfinite() else torch.tensor(2.0**128, dtype=torch.float64)
    size = master.abs()
    expected = torch.where(higher - size <= size - lower, higher, lower).copysign(master)
    expected = torch.where(expected.abs() > LARGEST, torch.inf * expected.sign(), expected)
    assert torch.equal(parameter, expected) and torch.equal(parameter.signbit(), expected.signbit())


def test_remainder_zero_says_that_the_parameter_is_the_master(formula):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    parameter = bits.view(torch.bfloat16)
    joined = formula.joined(parameter, torch.zeros_like(bits))
    assert torch.equal(joined.view(torch.int32), parameter.float().view(torch.int32) & ~0xFFFF)


@pytest.mark.parametrize("layout", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[3], lambda x: x[0, 0]])
def test_strides_do_not_matter(formula, layout):
    drawn = torch.randn(12, 20, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    master = drawn.to(torch.get_default_device())
    parameter, remainder = split(formula, master)
    assert torch.equal(formula.joined(layout(parameter), layout(remainder)), layout(master))
    formula.split_(layout(parameter), layout(remainder), 2 * layout(master))
    assert torch.equal(layout(formula.joined(parameter, remainder)), 2 * layout(master))


@pytest.mark.parametrize("lower", [-0x8000, -0x7FFF, -1, 1, 0x7FFF])
def test_a_parameter_that_somebody_else_wrote_moves_by_half_a_spacing_at_most(formula, lower):
    """A remainder is that of the value before. Zeros and infinities would become NaN by one that cannot be theirs."""
    parameter = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    joined = formula.joined(parameter, torch.full(parameter.shape, lower, dtype=torch.int16))
    assert torch.equal(joined.isnan(), parameter.isnan())
    finite = parameter.isfinite()
    magnitude = parameter[finite].float().abs().view(torch.int32)
    spacing = (magnitude + 0x10000).view(torch.float32).double() - magnitude.view(torch.float32).double()
    spacing[magnitude.view(torch.float32) == torch.finfo(torch.bfloat16).max] = 2.0**120
    assert ((joined[finite].double() - parameter[finite].double()).abs() <= spacing / 2).all()
