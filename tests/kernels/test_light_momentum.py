"""Momentum that soon forgets: little is left of a spike, and nothing without momentum."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.test_native_ops import FLOATS, SHAPE, names, random
from tests.support import oracles
from tests.support.operation_places import on_every_place

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]
SPIKE = 6e4  # float16 holds it


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=2)), ids=names)
def test_roundings_are_as_small_as_what_is_left_of_a_spike(pack_, dtypes, beta, nesterov):
    """Rounded are m - g and a sum of at most |g| + beta |m - g|, with Nesterov both again; without momentum none."""
    momentum, gradient = torch.full(SHAPE, SPIKE).to(dtypes[0]), random(SHAPE, dtypes[1], 1)
    exact = oracles.momentum_pack(momentum, gradient, beta, nesterov)
    left = beta * (momentum.double() - gradient.double()).abs()
    computing = 6 * oracles.unit_roundoff(*dtypes) * (gradient.double().abs() * (beta > 0) + 2 * left)
    packed = torch.full((1, *SHAPE), torch.nan, dtype=dtypes[1])
    pack_([momentum], [gradient], packed, beta, nesterov)
    for actual, expected in zip((momentum, packed[0]), exact):
        assert ((actual.double() - expected).abs() <= computing + oracles.rounding_error(expected, actual.dtype)).all()


@pytest.mark.parametrize("left", [SPIKE, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_momentum_nothing_is_left(both, dtype, left):
    """By the compiled and by the portable operations; an infinite gradient is infinite, and the next one is not."""
    for native in both:
        momentum, gradient = torch.full(SHAPE, left, dtype=dtype), random(SHAPE, dtype, 1)
        gradient[0, 0] = torch.inf
        packed = torch.empty(1, *SHAPE, dtype=dtype)
        native.momentum_pack_([momentum], [gradient], packed, 0.0, True)
        assert torch.equal(momentum, gradient) and torch.equal(packed[0], gradient)


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_without_memory_momentum_is_the_gradient_to_the_bit(pack_, nesterov):
    """Its negative zeros included, whatever momentum was before."""
    gradient = torch.tensor([[-0.0, 0.0, 1.5], [-2.0, 1e-40, -1e-40]])
    momentum, packed = torch.tensor([[torch.nan, torch.inf, 1.0]]).repeat(2, 1), torch.full((1, 2, 3), torch.nan)
    pack_([momentum], [gradient], packed, 0.0, nesterov)
    for result in momentum, packed[0]:
        assert torch.equal(result.view(torch.int32), gradient.view(torch.int32))
