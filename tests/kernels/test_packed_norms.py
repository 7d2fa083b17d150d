"""The norms that packing brings along are to the bit those of a pass over what was packed, and change nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.test_native_ops import ALIGNED, FLOATS, LAYOUTS, LONG_ROWS, RAGGED, SHAPE, names, random
from tests.kernels.test_quantized_momentum import stored
from tests.support.operation_places import on_every_place
from tests.support.pairwise import alike_and_pairwise

PACKED = torch.float32, torch.bfloat16, torch.float16
WHOLE = 70, 128  # rows of whole units, so that a contiguous matrix may be walked through as one run
LONG = [pytest.param(shape, marks=pytest.mark.many_blocks) for shape in (LONG_ROWS, LONG_ROWS[::-1])]
SHAPES = [SHAPE, RAGGED, ALIGNED, ALIGNED[::-1], WHOLE, WHOLE[::-1], (64, 64), *LONG, (1, 1), (5, 1), (1, 5)]

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]


@pytest.fixture
def assert_norms(native):
    """Check that packing with norms packs what it does without, and that the norms are those of the pass for them."""

    def assert_norms(momentum: list[Tensor], gradient: list[Tensor], packed: Tensor, **options) -> Tensor:
        twins = [m.clone() for m in momentum]
        scales = options.pop("momentum_scale", None)
        twin_scales = {} if scales is None else {"momentum_scale": [s.clone() for s in scales]}
        options |= {} if scales is None else {"momentum_scale": scales}
        norms = torch.full(packed.shape[:1], torch.nan, dtype=torch.float64)
        expected, without = torch.full_like(norms, torch.nan), torch.full_like(packed, torch.nan)
        native.momentum_pack_(twins, gradient, without, 0.9, True, **{**options, **twin_scales})
        native.momentum_pack_(momentum, gradient, packed, 0.9, True, norms=norms, **options)
        assert torch.equal(packed, without) and all(map(torch.equal, momentum, twins))
        assert all(map(torch.equal, scales or [], twin_scales.get("momentum_scale", [])))
        native.frobenius_norm_(expected, packed.mT if packed.size(1) > packed.size(2) else packed)
        assert torch.equal(norms, expected)
        return norms

    return assert_norms


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, FLOATS, PACKED)), ids=names)
def test_norms_are_of_what_is_stored(assert_norms, dtypes):
    momentum, gradient = random(SHAPE, dtypes[0], 0), random(SHAPE, dtypes[1], 1)
    assert_norms([momentum], [gradient], torch.full((1, *SHAPE), torch.nan, dtype=dtypes[2]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_norms_do_not_depend_on_strides(assert_norms, shape, dtype):
    values = random(shape, torch.float32, 0), random(shape, torch.float32, 1), torch.zeros(shape, dtype=dtype)
    first = None
    for layouts in alike_and_pairwise([*LAYOUTS.values()], 3):
        momentum, gradient, packed = (layout(x) for layout, x in zip(layouts, values))
        norms = assert_norms([momentum], [gradient], packed[None])
        first = norms if first is None else first
        assert torch.equal(norms, first)


@pytest.mark.parametrize("shape", [SHAPE, (70, 130), (64, 64), (128, 128), (300, 1)], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["blocks of rows", "blocks of columns"])
def test_norms_come_with_momentum_in_8_bits(assert_norms, shape, turned):
    codes, scale = stored(shape[::-1] if turned else shape, 0)
    codes, scale = (codes.mT, scale.mT) if turned else (codes, scale)
    gradient, packed = random(shape, torch.float32, 1), torch.zeros(shape, dtype=torch.bfloat16)
    for layouts in alike_and_pairwise([*LAYOUTS.values()], 3):
        of_codes, of_scales, out = (layout(x) for layout, x in zip(layouts, (codes, scale, packed)))
        assert_norms([of_codes], [gradient], out[None], momentum_scale=[of_scales])


def test_each_of_many_matrices_gets_its_norm(assert_norms):
    """A launch takes 128 of them."""
    momentum, gradient = (list(random((300, 7, 90), torch.float32, seed)) for seed in (0, 1))
    active = torch.arange(300) % 3 != 1
    norms = assert_norms(momentum, gradient, torch.zeros(300, 90, 7).mT, active=active)
    assert torch.equal(norms > 0, active)


def test_gradients_that_overflowed_give_zero(assert_norms):
    momentum, gradient = (list(random((2, *SHAPE), torch.float32, seed)) for seed in (0, 1))
    found_inf = torch.ones(1)
    assert (assert_norms(momentum, gradient, torch.zeros(2, *SHAPE), found_inf=found_inf) == 0).all()


def test_what_is_inactive_stays_and_packs_zeros_in_any_layout(assert_norms):
    values, closed = [random(ALIGNED, torch.float32, seed) for seed in range(3)], torch.zeros(1, dtype=torch.bool)
    for layouts in alike_and_pairwise([*LAYOUTS.values()], 3):
        momentum, gradient, packed = (layout(x) for layout, x in zip(layouts, values))
        assert assert_norms([momentum], [gradient], packed[None], active=closed) == 0
        assert torch.equal(momentum, values[0]) and not packed.any() and not packed.signbit().any()


def test_a_nan_stays_in_its_matrix(native):
    momentum, gradient = (list(random((3, *SHAPE), torch.float32, seed)) for seed in (0, 1))
    gradient[1][129, 69] = torch.nan
    norms, packed = torch.zeros(3, dtype=torch.float64), torch.zeros(3, *SHAPE)
    native.momentum_pack_(momentum, gradient, packed, 0.9, True, norms=norms)
    assert norms.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_sizes_may_be_zero(assert_norms, shape):
    momentum, gradient = (list(torch.ones(shape)) for _ in range(2))
    assert (assert_norms(momentum, gradient, torch.ones(shape)) == 0).all()
