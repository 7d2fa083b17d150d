"""The compiled operations read and round all numbers of 16 bits as torch does, and round a decay and a step once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.operation_places import on_every_place

# Below the bits that float16 keeps, and around the middle between two of its numbers, subnormal ones included, whose
# last bit is among the upper 16 of a float.
LOWER_HALVES = 0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF
COLUMNS = 256

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.many_blocks, on_every_place()]
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture
def packed_as(kernel):
    """Return a function that packs gradients without any momentum: what is packed is the gradient."""

    def packed_as(dtype: torch.dtype, gradient: Tensor) -> Tensor:
        momentum, packed = torch.zeros(gradient.shape), torch.empty(1, *gradient.shape, dtype=dtype)
        kernel.kernels.native.momentum_pack_([momentum], [gradient], packed, 0.0, False)
        return packed[0]

    return packed_as


def all_numbers(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, COLUMNS)


def assert_same_numbers(numbers: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernels_ci
@HALVES
def test_each_number_is_read_as_what_it_is(packed_as, dtype):
    numbers = all_numbers(dtype)
    assert_same_numbers(packed_as(torch.float32, numbers), numbers.float())


@pytest.mark.kernels_ci
@HALVES
def test_each_parameter_that_does_not_move_keeps_its_bits(kernel, dtype):
    """Zeros keep their sign, too; of a NaN only that it is one."""
    parameter, number = all_numbers(dtype), torch.zeros((), dtype=torch.float64, device="cpu")
    before, update = parameter.clone(), torch.zeros(1, *parameter.shape)
    kernel.kernels.native.descend_([parameter], update, number, number, number)
    same = parameter.view(torch.int16) == before.view(torch.int16)
    assert (same | (parameter.isnan() & before.isnan())).all()


@pytest.mark.kernels_ci
@HALVES
def test_floats_are_rounded_to_the_nearest_and_those_in_the_middle_to_the_even_one(packed_as, dtype):
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    floats = torch.cat([upper | lower for lower in LOWER_HALVES]).view(torch.float32).view(-1, COLUMNS)
    assert_same_numbers(packed_as(dtype, floats), floats.to(dtype))


def test_what_decay_keeps_is_rounded_once(kernel):
    """1 - 2^-25 - 2^-52 is nearest to 1 - 2^-24. A decay rounded to float32 before would be 2^-25, and leave 1."""
    parameter, update, one = torch.ones(1, 1), torch.zeros(1, 1, 1), torch.ones((), dtype=torch.float64, device="cpu")
    kernel.kernels.native.descend_([parameter], update, one, one * (2.0**-25 + 2.0**-52), one)
    assert parameter.item() == 1 - 2.0**-24


def test_the_length_of_a_step_is_rounded_once(kernel):
    """(1 + 2^-24)^2 is nearest to 1 + 2^-23. Learning rate and multiplier rounded to float32 before would both be 1."""
    parameter, update, one = torch.zeros(1, 1), -torch.ones(1, 1, 1), torch.ones((), dtype=torch.float64, device="cpu")
    kernel.kernels.native.descend_([parameter], update, one + 2.0**-24, 0 * one, one + 2.0**-24)
    assert parameter.item() == 1 + 2.0**-23
