"""The compiled operations compute their formulas, whatever the dtypes, strides, batch and threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support import oracles
from tests.support.operation_places import on_every_place
from tests.support.pairwise import alike_and_pairwise

FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
SHAPE = 130, 70  # more than two square tiles, none of them whole at the edge
RAGGED = 141, 83  # tiles at the edge have whole squares of what is transposed in registers, and a rest
ALIGNED = 136, 72  # rows and columns start where an access does
MIXED_SHAPES = (17, 5), (0, 9), (130, 70), (1, 1), (4, 0), (3, 5000)
LONG_ROWS = 3, 9001  # more than two runs
MODES = {"decoupled": 0, "independent": 1, "cautious": 2}

LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.clone().mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x, x], 1)[:, x.size(1) : 2 * x.size(1)],
    "every_other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]


def names(dtypes) -> str:
    return "-".join(str(dtype).split(".")[1] for dtype in dtypes)


def random(shape, dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(torch.get_default_device(), dtype)


def randoms(shapes, dtype, seed: int) -> list[Tensor]:
    return [random(shape, dtype, seed + i) for i, shape in enumerate(shapes)]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def descend(op, parameter, update, **options) -> None:
    op(parameter, update, scalar(0.02), scalar(0.1), scalar(1.5), **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=3)), ids=names)
def test_momentum_and_update_are_the_formula_rounded_once(pack_, dtypes, nesterov):
    """Four roundings per average, each of at most |m| + |g|, before the one to the result's dtype."""
    momentum, gradient = random(SHAPE, dtypes[0], 0), random(SHAPE, dtypes[1], 1)
    exact = oracles.momentum_pack(momentum, gradient, 0.95, nesterov)
    computing = 8 * oracles.unit_roundoff(*dtypes) * (momentum.double().abs() + gradient.double().abs())
    packed = torch.full((1, *SHAPE), torch.nan, dtype=dtypes[2])
    pack_([momentum], [gradient], packed, 0.95, nesterov)
    for actual, expected in zip((momentum, packed[0]), exact):
        assert ((actual.double() - expected).abs() <= computing + oracles.rounding_error(expected, actual.dtype)).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("decay_mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=2)), ids=names)
def test_descent_is_the_formula_rounded_once(descend_, dtypes, decay_mode):
    """Rounded besides the result: keep, the step and its product; the last two are below the first and |u|."""
    parameter, update = random(SHAPE, dtypes[0], 0), random(SHAPE, dtypes[1], 1)
    exact = oracles.descend(parameter, update, 0.02, 0.1, 1.5, decay_mode)
    computing = 4 * oracles.unit_roundoff(*dtypes) * (parameter.double().abs() + update.double().abs())
    descend(descend_, [parameter], update[None], decay_mode=decay_mode)
    assert ((parameter.double() - exact).abs() <= computing + oracles.rounding_error(exact, dtypes[0])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float64_is_rounded_to_half_precision_in_one_step(pack_, dtype):
    """By way of float32 a number just off the middle of two would become the middle, and then go to the even one."""
    half = torch.finfo(dtype).eps / 2
    values = torch.tensor([[1 + half + 2.0**-40, 1 + 3 * half - 2.0**-40, -1 - half - 2.0**-40]], dtype=torch.float64)
    packed = torch.zeros(1, 1, 3, dtype=dtype)
    pack_([torch.zeros_like(values)], [values], packed, 0.0, False)
    assert packed.flatten().tolist() == [1 + 2 * half, 1 + 2 * half, -1 - 2 * half]


@pytest.mark.parametrize("shape", [SHAPE, RAGGED, ALIGNED, LONG_ROWS, (1, 1), (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_strides_do_not_change_a_bit_of_momentum(pack_, shape, dtype):
    values = random(shape, dtype, 0), random(shape, dtype, 1), torch.zeros(shape, dtype=torch.float16)
    expected = [x.clone() for x in values]
    pack_([expected[0]], [expected[1]], expected[2][None], 0.9, True)
    for layouts in alike_and_pairwise([*LAYOUTS.values()], 3):
        momentum, gradient, packed = (layout(x) for layout, x in zip(layouts, values))
        pack_([momentum], [gradient], packed[None], 0.9, True)
        assert all(torch.equal(x, y) for x, y in zip((momentum, gradient, packed), expected))


@pytest.mark.parametrize("shape", [SHAPE, RAGGED, ALIGNED, LONG_ROWS, (1, 1), (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("seeded", [False, True], ids=["nearest", "stochastic"])
def test_strides_do_not_change_a_bit_of_a_parameter(descend_, shape, seeded):
    values = random(shape, torch.bfloat16, 0), random(shape, torch.float32, 1)
    options = {"row_scale": torch.rand(shape[0])} if shape == SHAPE else {}
    if seeded:
        options["seeds"] = torch.tensor([7])
    expected = values[0].clone()
    descend(descend_, [expected], values[1][None], **options)
    for layouts in itertools.product(LAYOUTS.values(), repeat=2):
        parameter, update = (layout(x) for layout, x in zip(layouts, values))
        descend(descend_, [parameter], update[None], **options)
        assert torch.equal(parameter, expected)


@pytest.mark.kernels_ci
def test_tall_matrices_pack_into_a_batch_of_wide_ones(pack_, descend_):
    shape, wide = (3, 200, 70), torch.zeros(3, 70, 200, dtype=torch.bfloat16)
    momentum, gradient = random(shape, torch.float32, 0), random(shape, torch.float32, 1)
    straight, twin = torch.zeros(shape, dtype=torch.bfloat16), momentum.clone()
    pack_(list(momentum), list(gradient), wide.mT, 0.95, True)
    pack_(list(twin), list(gradient), straight, 0.95, True)
    assert torch.equal(wide.mT, straight) and torch.equal(momentum, twin)
    descend(descend_, list(momentum), wide.mT)
    descend(descend_, list(twin), straight)
    assert torch.equal(momentum, twin)


def test_offsets_place_matrices_of_any_shape(pack_, descend_):
    offsets = [20, 9000, 200, 9999, 25_000, 10_000]
    momentum, gradient = randoms(MIXED_SHAPES, torch.float32, 0), randoms(MIXED_SHAPES, torch.float32, 10)
    alone = [m.clone() for m in momentum]
    packed = torch.full((25_000,), 3.0, dtype=torch.bfloat16)
    pack_(momentum, gradient, packed, 0.9, True, offsets=offsets)
    outside = torch.ones(25_000, dtype=torch.bool)
    for m, g, shape, offset in zip(alone, gradient, MIXED_SHAPES, offsets):
        part = torch.zeros(1, *shape, dtype=torch.bfloat16)
        pack_([m], [g], part, 0.9, True)
        assert torch.equal(packed[offset : offset + m.numel()], part.flatten())
        outside[offset : offset + m.numel()] = False
        descend(descend_, [m], part)
    assert (packed[outside] == 3).all()
    descend(descend_, momentum, packed, offsets=offsets)
    assert all(torch.equal(m, a) for m, a in zip(momentum, alone))


def test_gradients_are_untouched(pack_):
    gradient = randoms([SHAPE] * 2, torch.float32, 0)
    before = [g.clone() for g in gradient]
    options = {"maximize": True, "grad_scale": scalar(8)}
    pack_(randoms([SHAPE] * 2, torch.float32, 5), gradient, torch.zeros(2, *SHAPE), 0.9, True, **options)
    assert all(torch.equal(g, b) for g, b in zip(gradient, before))


@pytest.mark.parametrize("scale", [torch.tensor(1024.0), scalar(1024), scalar(1)], ids=["float32", "float64", "one"])
def test_gradients_are_unscaled_and_negated_to_maximize(pack_, scale):
    gradient, results = random(SHAPE, torch.float32, 1), []
    for grad, options in (gradient, {"maximize": True, "grad_scale": scale}), (-gradient / scale.item(), {}):
        momentum, packed = random(SHAPE, torch.float32, 0), torch.zeros(1, *SHAPE)
        pack_([momentum], [grad], packed, 0.9, True, **options)
        results.append((momentum, packed))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.kernels_ci
def test_inactive_matrices_keep_their_values_and_pack_zeros(pack_, descend_):
    active = torch.tensor([True, False, True])
    momentum, gradient = random((3, *SHAPE), torch.float32, 0), random((3, *SHAPE), torch.float32, 5)
    gradient[1] = torch.nan
    before, packed = momentum.clone(), torch.full((3, *SHAPE), torch.nan)
    pack_(list(momentum), list(gradient), packed, 0.9, True, active=active)
    assert torch.equal((momentum == before).all((1, 2)), ~active) and torch.equal((packed == 0).all((1, 2)), ~active)
    before = momentum.clone()
    descend(descend_, list(momentum), gradient, active=active)
    assert torch.equal((momentum == before).all((1, 2)), ~active) and not momentum.isnan().any()


def test_nothing_moves_after_an_infinite_gradient(pack_, descend_):
    for flag, moves in (1.0, False), (2.0, False), (torch.nan, False), (0.0, True):
        momentum, gradient = random(SHAPE, torch.float32, 0), random(SHAPE, torch.float32, 1)
        before, packed = momentum.clone(), torch.full((1, *SHAPE), torch.nan)
        pack_([momentum], [gradient], packed, 0.9, True, found_inf=torch.tensor(flag))
        assert torch.equal(momentum, before) != moves and (packed == 0).all() != moves
        before = momentum.clone()
        descend(descend_, [momentum], gradient[None], found_inf=torch.tensor([flag]))
        assert torch.equal(momentum, before) != moves


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_a_tensor_of_numbers_has_one_for_all_or_one_per_matrix(descend_, device, place):
    values, update = randoms([SHAPE] * 2, torch.float32, 0), random((2, *SHAPE), torch.float32, 5)
    wide = torch.tensor([0.7, 0.3], dtype=torch.float64)
    numbers = [n.to("cpu" if place == "cpu" else device) for n in (wide, torch.tensor([0.1]), torch.tensor([2.0, 3.0]))]
    together, alone = [v.clone() for v in values], [v.clone() for v in values]
    descend_(together, update, *numbers)
    for i in range(2):
        descend_([alone[i]], update[i : i + 1], *(scalar(float(n[i % len(n)])) for n in numbers))
        assert torch.equal(together[i], alone[i])


@pytest.mark.parametrize("by_columns", [False, True])
def test_rows_are_scaled_after_the_step(descend_, by_columns):
    """Columns of 12 end within a chunk; the scale has nothing past its last row."""
    shapes = [(70, 9), (0, 3), (12, 300)]
    values, scale = randoms(shapes, torch.float64, 0), torch.rand(82)
    values = [v.mT.contiguous().mT if by_columns else v for v in values]
    update, offsets = random((4230,), torch.float64, 5), [0, 0, 630]
    plain, scaled = [v.clone() for v in values], [v.clone() for v in values]
    descend(descend_, plain, update, offsets=offsets)
    descend(descend_, scaled, update, offsets=offsets, row_scale=scale)
    for p, s, rows in zip(plain, scaled, scale.split([70, 0, 12])):
        assert torch.equal(s, p * rows[:, None].double())


def test_cautious_decay_sees_signs_whose_product_underflows(descend_):
    parameter = torch.full((1, 2), 1e-30)
    descend_([parameter], torch.tensor([[[1e-30, -1e-30]]]), scalar(0.5), scalar(1), scalar(0), decay_mode=2)
    assert torch.equal(parameter, torch.tensor([[0.5e-30, 1e-30]]))


def test_cautious_decay_leaves_what_is_not_moved(descend_):
    """A zero has no sign to agree with."""
    parameter = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
    before = parameter.clone()
    descend(descend_, [parameter], torch.tensor([[[0.0, 0.0, -0.0, -0.0]]]), decay_mode=MODES["cautious"])
    assert torch.equal(parameter, before)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_neither_batch_nor_threads_change_a_bit(pack_, descend_, dtype):
    shapes, seeds = [SHAPE, (300, 400), LONG_ROWS, (64, 64)], torch.arange(4)
    offsets = list(itertools.accumulate((m * n for m, n in shapes), initial=0))
    options = {} if dtype == torch.float32 else {"seeds": seeds}
    gradient, results = randoms(shapes, dtype, 9), []
    for threads in 2, 1, torch.get_num_threads():
        torch.set_num_threads(threads)
        momentum, packed = randoms(shapes, dtype, 0), torch.zeros(offsets[-1], dtype=torch.float16)
        pack_(momentum, gradient, packed, 0.95, True, offsets=offsets[:-1])
        descend(descend_, momentum, packed, offsets=offsets[:-1], **options)
        results.append([*momentum, packed])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    for i, shape in enumerate(shapes):
        momentum, packed = random(shape, dtype, i), torch.zeros(1, *shape, dtype=torch.float16)
        pack_([momentum], [gradient[i]], packed, 0.95, True)
        descend(descend_, [momentum], packed, **{name: x[i : i + 1] for name, x in options.items()})
        assert torch.equal(momentum, results[0][i])


@pytest.mark.parametrize("count", [0, 2])
def test_empty_lists_and_matrices_are_fine(pack_, descend_, count):
    empty, buffer = [torch.zeros(0, 4) for _ in range(count)], torch.zeros(count, 0, 4)
    pack_(empty, [e.clone() for e in empty], buffer, 0.9, True, active=torch.ones(count, dtype=torch.bool))
    descend(descend_, empty, buffer, row_scale=torch.zeros(0))
    # Seeds are for half precision, and an empty list has no dtype.
    descend(descend_, [e.bfloat16() for e in empty], buffer, seeds=torch.arange(count))
