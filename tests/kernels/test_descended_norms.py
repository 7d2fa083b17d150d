"""The norms that a descent brings along are to the bit those of a pass over its updates, and change nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.test_native_ops import ALIGNED, FLOATS, LAYOUTS, MODES, SHAPE, descend, names, random
from tests.kernels.test_packed_norms import PACKED, SHAPES
from tests.support.operation_places import on_every_place

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]


def assert_norms(native, parameter: list[Tensor], update: Tensor, **options) -> Tensor:
    """Check that a descent with norms does what it does without, and that the norms are those of the pass for them."""
    twins, remainder = [p.clone() for p in parameter], options.pop("remainder", [])
    halves = [r.clone() for r in remainder]
    norms = torch.full(update.shape[:1], torch.nan, dtype=torch.float64)
    expected = torch.full_like(norms, torch.nan)
    descend(native.descend_, twins, update, **options, **({"remainder": halves} if halves else {}))
    options |= {"remainder": remainder} if remainder else {}
    descend(native.descend_, parameter, update, norms=norms, **options)
    assert all(map(torch.equal, [*parameter, *remainder], [*twins, *halves]))
    native.frobenius_norm_(expected, update.mT if update.size(1) > update.size(2) else update)
    assert torch.equal(norms, expected)
    return norms


@pytest.mark.kernels_ci
@pytest.mark.parametrize("decay_mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, PACKED)), ids=names)
def test_norms_are_those_of_the_updates(native, dtypes, decay_mode):
    parameter, update = random(SHAPE, dtypes[0], 0), random(SHAPE, dtypes[1], 1)
    assert_norms(native, [parameter], update[None], decay_mode=decay_mode)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_norms_do_not_depend_on_strides(native, shape, dtype):
    values, first = (random(shape, torch.float32, 0), random(shape, dtype, 1)), None
    for layouts in itertools.product(LAYOUTS.values(), repeat=2):
        parameter, update = (layout(x) for layout, x in zip(layouts, values))
        norms = assert_norms(native, [parameter], update[None])
        first = norms if first is None else first
        assert torch.equal(norms, first)


OPTIONS = {
    "row_scale": lambda shape: {"row_scale": torch.linspace(0.5, 1.5, shape[0])},
    "seeds": lambda shape: {"seeds": torch.tensor([7])},
    "seeds in a whole": lambda shape: {"seeds": torch.tensor([7]), "origins": [3, 5, 9100]},
    "remainder": lambda shape: {"remainder": [random(shape, torch.float32, 2).to(torch.int16)]},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_come_with_all_that_a_descent_can_do(native, shape, option):
    values = random(shape, torch.bfloat16, 0), random(shape, torch.bfloat16, 1)
    for layouts in itertools.product(LAYOUTS.values(), repeat=2):
        parameter, update = (layout(x) for layout, x in zip(layouts, values))
        assert_norms(native, [parameter], update[None], **OPTIONS[option](shape))


def test_each_of_many_updates_has_its_norm_even_if_its_parameter_stays(native):
    """A launch takes 128 of them."""
    parameter, update = list(random((300, 90, 7), torch.float32, 0)), random((300, 7, 90), torch.float32, 1).mT
    norms = assert_norms(native, parameter, update, active=torch.arange(300) % 3 != 1)
    for options in {"found_inf": torch.ones(1)}, {}:
        assert torch.equal(assert_norms(native, parameter, update, **options), norms)
    alone = [assert_norms(native, [p], u[None]) for p, u in zip(parameter[:5], update)]
    assert torch.equal(torch.cat(alone), norms[:5])


def test_what_stays_does_so_in_any_layout(native):
    values, closed = [random(ALIGNED, torch.float32, seed) for seed in (0, 1)], torch.zeros(1, dtype=torch.bool)
    for layouts in itertools.product(LAYOUTS.values(), repeat=2):
        parameter, update = (layout(x) for layout, x in zip(layouts, values))
        assert_norms(native, [parameter], update[None], active=closed)
        assert torch.equal(parameter, values[0])


def test_a_nan_stays_in_its_matrix(native):
    parameter, update = list(random((3, *SHAPE), torch.float32, 0)), random((3, *SHAPE), torch.float32, 1)
    update[1, 129, 69] = torch.nan
    norms = torch.zeros(3, dtype=torch.float64)
    descend(native.descend_, parameter, update, norms=norms)
    assert norms.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_sizes_may_be_zero(native, shape):
    assert (assert_norms(native, list(torch.ones(shape)), torch.ones(shape)) == 0).all()
