"""Stochastic rounding is unbiased, lands on neighbours, and follows from seed and place alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.operation_places import on_every_place

HALF_DTYPES = torch.bfloat16, torch.float16
COUNT = 1 << 16

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]


def rounded(descend_, values: Tensor, dtype: torch.dtype, seed: int = 0, **options) -> Tensor:
    """Values of a matrix rounded to `dtype`: a parameter of zeros from which their negative is taken."""
    parameter, number = torch.zeros(values.shape, dtype=dtype), torch.ones(())
    descend_([parameter], -values[None], number, 0 * number, number, seeds=torch.tensor([seed]), **options)
    return parameter


def below(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of `dtype` next to `values` towards zero."""
    nearest = values.to(dtype)
    return torch.where(nearest.double().abs() > values.double().abs(), nearest.nextafter(0 * nearest), nearest)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("work", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1.0, 1.99, 3e-5, 2e-7, 1e-40, 60000.0], ids=str)
@pytest.mark.parametrize("sign", [1, -1], ids=["+", "-"])
@pytest.mark.many_blocks
def test_rounding_is_unbiased_and_lands_on_neighbours(descend_, dtype, work, size, sign):
    """A mean of n draws from two values has variance p (1 - p) / n.

    Below 6e-5 float16 is subnormal; there 13 random bits resolve probabilities to 2^-13 of the spacing. Below 1e-38
    bfloat16 is, too.
    """
    lower = torch.tensor(size).to(dtype)
    spacing = (lower.nextafter(torch.tensor(torch.inf, dtype=dtype)) - lower).double()
    for share in 0.0, 1 / 3, 0.5, 0.9:
        value = (sign * (lower.double() + share * spacing)).to(work)
        result = rounded(descend_, value.expand(1, COUNT), dtype).double() * sign
        ups = (result - lower.double()) / spacing
        assert set(ups.unique().tolist()) <= {0.0, 1.0}
        expected = (value.double() * sign - lower.double()) / spacing
        assert abs(ups.mean() - expected) <= 5 * (expected * (1 - expected) / COUNT).sqrt() + 2.0**-13


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_representable_numbers_are_unchanged(descend_, dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)[None]
    result = rounded(descend_, values.float(), dtype)
    assert torch.equal(result.isnan(), values.isnan())
    assert torch.equal(result.nan_to_num(0.0), values.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_zero_keeps_its_sign(descend_, dtype):
    parameter, number = torch.tensor([[0.0, -0.0]], dtype=dtype), torch.ones(())
    descend_([parameter], torch.zeros(1, 1, 2), number, 0 * number, number, seeds=torch.tensor([0]))
    assert parameter.signbit().tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_all_magnitudes_round_to_a_neighbour(descend_, dtype):
    torch.manual_seed(0)
    exponents = torch.rand(40, 1000) * 280 - 150
    values = torch.randn(40, 1000).sign() * exponents.exp2().clamp_max(60000.0)
    result, lower = rounded(descend_, values, dtype), below(values, dtype)
    upper = lower.nextafter(values.sign().to(dtype) * torch.inf)
    assert ((result == lower) | (result == upper)).all()


@pytest.mark.kernels_ci
def test_result_is_a_function_of_the_seed(descend_):
    """Another seed gives another result."""
    torch.manual_seed(0)
    values = torch.rand(50, 70)
    first, again, other = (rounded(descend_, values, torch.bfloat16, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_draws_are_independent_across_places_and_seeds(descend_):
    """The correlation of n independent coin tosses is within 5/sqrt(n) of zero."""
    half = torch.full((1, COUNT), 1 + 2.0**-8)
    ups = torch.cat([rounded(descend_, half, torch.bfloat16, seed).double() for seed in range(8)])
    tosses = (ups - ups.mean()) / ups.std()
    between = torch.corrcoef(tosses) - torch.eye(8)
    along = torch.stack([(tosses[:, step:] * tosses[:, :-step]).mean(1) for step in (1, 2, 8, 64, 768)])
    assert torch.cat([between.flatten(), along.flatten()]).abs().max() <= 5 / COUNT**0.5


def test_elements_of_a_whole_that_are_far_apart_have_draws_of_their_own(descend_):
    """2^32 elements, from which a counter of 32 bits would begin anew; that 700 tosses agree has a chance of 2^-700."""
    half = torch.full((10, 70), 1 + 2.0**-8)
    near, far = (rounded(descend_, half, torch.bfloat16, origins=[row, 0, 2**12]) for row in (0, 2**20))
    assert not torch.equal(near, far)


def first_elements(descend_, value: Tensor, dtype: torch.dtype, seeds: int) -> Tensor:
    """The first elements of matrices that hold `value`, rounded with the seeds 0, 1, ..."""
    parameter, number = list(torch.zeros(seeds, 1, 1, dtype=dtype)), torch.ones(())
    update = -value.expand(seeds, 1, 1).contiguous()
    descend_(parameter, update, number, 0 * number, number, seeds=torch.arange(seeds))
    return torch.cat(parameter).flatten()


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("share", [1 / 3, 0.5, 0.9])
@pytest.mark.many_blocks
def test_first_element_is_unbiased_over_seeds(descend_, dtype, share):
    seeds, eps = 1 << 14, torch.finfo(dtype).eps
    ups = (first_elements(descend_, torch.tensor(1 + share * eps), dtype, seeds).double() - 1) / eps
    assert abs(ups.mean() - share) <= 5 * (share * (1 - share) / seeds) ** 0.5 + 2.0**-13


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_small_seeds_give_the_first_element_random_bits(descend_, dtype):
    """At 1 - 2^-13 of the spacing all random numbers but 2^-13 of them round up; zero cuts."""
    value = torch.tensor(1 + (1 - 2.0**-13) * torch.finfo(dtype).eps)
    assert (first_elements(descend_, value, dtype, seeds=16) > 1).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_shard_rounds_as_the_whole_does(descend_, dtype):
    torch.manual_seed(0)
    whole = torch.rand(40, 60)
    expected = rounded(descend_, whole, dtype, seed=9)
    for row, col, rows, cols in (0, 0, 17, 60), (17, 0, 23, 60), (5, 7, 20, 33), (39, 59, 1, 1), (3, 60, 2, 0):
        part = slice(row, row + rows), slice(col, col + cols)
        result = rounded(descend_, whole[part], dtype, seed=9, origins=[row, col, 60])
        assert torch.equal(result, expected[part])
