"""Momentum in 8 bits is the average of gradients within its bound, whatever the layout, batch and threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.test_native_ops import FLOATS, LAYOUTS, names, random
from tests.support import oracles
from tests.support.operation_places import on_every_place
from tests.support.pairwise import alike_and_pairwise

SHAPES = (130, 200), (3, 70), (70, 3), (5, 64), (1, 5000), (1, 1), (300, 1)
LONG_ROWS = pytest.param((3, 9001), marks=pytest.mark.many_blocks)
ALIGNED = 144, 80  # rows and columns of codes start where an access of a GPU does
BETA = 0.95

pytestmark = [pytest.mark.usefixtures("device"), on_every_place()]


def blocks(cols: int) -> int:
    return -(-cols // 64)


def stored(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales as any step may have left them: scales of a row differ by up to 1e4."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, shape, generator=generator, device="cpu", dtype=torch.int8)
    scale = 10 ** (-4 * torch.rand(shape[0], blocks(shape[1]), generator=generator, device="cpu"))
    place = torch.get_default_device()
    return codes.to(place), scale.to(place)


def packed_by(pack_, codes: Tensor, scale: Tensor, gradient: Tensor, dtype=torch.float32, **options) -> Tensor:
    packed = torch.full((1, *codes.shape), torch.nan, dtype=dtype)
    pack_([codes], [gradient], packed, BETA, True, momentum_scale=[scale], **options)
    return packed[0]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=2)), ids=names)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_momentum_is_the_average_within_its_bound_and_the_direction_exact(pack_, shape, dtypes):
    """The direction is of the average before it is stored: its error is that of the formula's roundings alone."""
    (codes, scale), gradient = stored(shape, 0), random(shape, dtypes[0], 1)
    before = oracles.dequantized(codes, scale)
    momentum, direction = oracles.momentum_pack(before, gradient, BETA, True)
    packed = packed_by(pack_, codes, scale, gradient, dtypes[1])
    # One rounding more than momentum in floating point has: of the value that was stored.
    computing = 9 * oracles.unit_roundoff(*dtypes) * (before.abs() + gradient.double().abs())
    assert ((packed.double() - direction).abs() <= computing + oracles.rounding_error(direction, dtypes[1])).all()
    bound = computing + oracles.quantization_error(momentum)
    assert ((oracles.dequantized(codes, scale) - momentum).abs() <= bound).all()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_the_bound_holds_for_numbers_of_any_size(pack_, size):
    """Below 127^2 2^-126 the scale stays 2^-126, and the largest codes are not used."""
    gradient = random((4, 100), torch.float64, 0).clamp(-1, 1) * size
    codes, scale = torch.zeros(4, 100, dtype=torch.int8), torch.zeros(4, 2)
    packed_by(pack_, codes, scale, gradient, torch.float64)
    exact = (1 - BETA) * gradient
    assert ((oracles.dequantized(codes, scale) - exact).abs() <= oracles.quantization_error(exact)).all()
    assert scale.min() >= 2.0**-126


@pytest.mark.kernels_ci
def test_zero_stays_zero(pack_):
    codes, scale = torch.zeros(3, 70, dtype=torch.int8), torch.zeros(3, 2)
    assert not packed_by(pack_, codes, scale, torch.zeros(3, 70)).any()
    assert not codes.any()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_not_finite_stays_so_in_its_block_and_nowhere_else(pack_, dtype, bad):
    shape, at = (3, 200), (1, 70)
    (codes, scale), gradient = stored(shape, 0), random(shape, dtype, 1)
    gradient[at] = bad
    packed = packed_by(pack_, codes, scale, gradient)
    assert torch.equal(packed.isfinite().logical_not().nonzero().cpu(), torch.tensor([at], device="cpu"))
    spoiled = torch.zeros(shape, dtype=torch.bool)
    spoiled[1, 64:128] = True
    assert torch.equal(oracles.dequantized(codes, scale).isnan(), spoiled)
    later = packed_by(pack_, codes, scale, random(shape, dtype, 2))
    assert torch.equal(later.isnan(), spoiled)


def test_a_small_average_beside_a_large_one_moves(pack_):
    """From zero, beside 1 = 127^2 s, where the gradient is 0.002: 0.05 * 0.002 is 1.6 s, above s / 4, which becomes s.

    Of equal steps, 1 / 127 each, it is 0.0127, below 1 / 2, so that the average would stay zero for ever. Here it stops
    at 4 s = 0.00025, from where 0.95 * 4 s + 1.6 s = 5.4 s, below (5 / 2)^2 s, leads no further: without noise, an
    average may stop short of its gradient by the bound times 1 / (1 - beta).
    """
    gradient = torch.full((1, 64), 0.002)
    codes, scale = torch.zeros(1, 64, dtype=torch.int8), torch.full((1, 1), 1 / 127**2)
    gradient[0, 0], codes[0, 0] = 1, 127
    for _ in range(50):
        packed_by(pack_, codes, scale, gradient)
    assert codes[0, 0] == 127 and (codes[0, 1:] == 2).all()
    momentum = oracles.dequantized(codes, scale)
    assert ((momentum - gradient).abs() <= oracles.quantization_error(momentum) / (1 - BETA)).all()


def equal_steps(x: Tensor, shift: Tensor) -> Tensor:
    """Return x (m, n), in blocks of 64, rounded to multiples of a block's largest over 127: floor(steps + shift)."""
    step = oracles.in_blocks(x).abs().amax(2).repeat_interleave(64, 1) / 127
    return step * (x / step + shift).floor()


def test_errors_stay_small_under_noise(pack_):
    """The relative error, by columns of one size, of averages after 100 steps, and what other roundings would have.

    Even columns, and columns of sizes e^N(0, 1), as gradients have them by the size of their inputs.
    """
    shape, generator = (64, 256), torch.Generator().manual_seed(0)
    even, uneven = torch.ones(256), torch.randn(256, generator=generator, device="cpu").exp().to(torch.ones(1).device)
    signal = 0.3 * random(shape, torch.float32, 1000)
    for columns, most in (even, 0.03), (uneven, 0.09):
        codes, scale = torch.zeros(shape, dtype=torch.int8), torch.zeros(64, 4)
        exact, nearest, stochastic = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        for step in range(100):
            gradient = (signal + random(shape, torch.float32, step)) * columns
            packed_by(pack_, codes, scale, gradient)
            exact, nearest, stochastic = (BETA * m + (1 - BETA) * gradient for m in (exact, nearest, stochastic))
            nearest = equal_steps(nearest, torch.tensor(0.5))
            stochastic = equal_steps(stochastic, (random(shape, torch.float64, 2000 + step) / 2**0.5).erf() / 2 + 0.5)
        size = (exact / columns).norm()
        stored = oracles.dequantized(codes, scale)
        error, *others = (((m - exact) / columns).norm() / size for m in (stored, nearest, stochastic))
        assert error < most
    assert others[0] > 3 * error and others[1] > 4 * error


@pytest.mark.parametrize("shape", [(130, 70), ALIGNED, LONG_ROWS, (1, 1), (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_strides_do_not_change_a_bit(pack_, shape, along):
    """Nor does it matter whether blocks lie along the rows of matrices or, transposed, along their columns."""
    (codes, scale), gradient = stored(shape, 0), random(shape, torch.float32, 1)
    wanted = [codes.clone(), scale.clone()]
    wanted.append(packed_by(pack_, *wanted, gradient, torch.float16))
    turned = (lambda x: x.mT) if along == "columns" else (lambda x: x)
    for layouts in alike_and_pairwise([*LAYOUTS.values()], 4):
        values = codes, scale, gradient, torch.zeros(shape, dtype=torch.float16)
        tensors = [layout(x) for layout, x in zip(layouts, values)]
        momentum, scales, its_gradient, packed = map(turned, tensors)
        pack_([momentum], [its_gradient], packed[None], BETA, True, momentum_scale=[scales])
        assert all(torch.equal(tensors[i], wanted[i]) for i in (0, 1)) and torch.equal(tensors[3], wanted[2])


@pytest.mark.kernels_ci
def test_parts_that_are_cut_between_blocks_have_the_bits_of_the_whole(pack_):
    shape = 100, 300
    (codes, scale), gradient = stored(shape, 0), random(shape, torch.float32, 1)
    parts = []
    for rows, cols in itertools.product([(0, 40), (40, 100)], [(0, 64), (64, 256), (256, 300)]):
        box = slice(*rows), slice(*cols)
        momentum = codes[box].clone(), scale[rows[0] : rows[1], cols[0] // 64 : blocks(cols[1])].clone()
        parts.append((box, momentum, packed_by(pack_, *momentum, gradient[box])))
    packed = packed_by(pack_, codes, scale, gradient)
    for (rows, cols), (its_codes, its_scale), its_packed in parts:
        assert torch.equal(its_codes, codes[rows, cols]) and torch.equal(its_packed, packed[rows, cols])
        assert torch.equal(its_scale, scale[rows, cols.start // 64 : blocks(cols.stop)])


def test_neither_batch_nor_threads_change_a_bit(pack_):
    shapes = [(130, 70), (300, 400), (0, 9), (3, 9001), (4, 0), (64, 64)]
    offsets = list(itertools.accumulate((m * n for m, n in shapes), initial=0))
    gradients = [random(shape, torch.bfloat16, i) for i, shape in enumerate(shapes)]
    results = []
    for threads in 2, 1, torch.get_num_threads():
        torch.set_num_threads(threads)
        codes, scales = zip(*(stored(shape, i) for i, shape in enumerate(shapes)))
        packed = torch.zeros(offsets[-1])
        pack_(codes, gradients, packed, BETA, True, offsets=offsets[:-1], momentum_scale=scales)
        results.append([*codes, *scales, packed])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    for i, shape in enumerate(shapes):
        codes, scale = stored(shape, i)
        packed = packed_by(pack_, codes, scale, gradients[i])
        assert torch.equal(codes, results[0][i]) and torch.equal(scale, results[0][len(shapes) + i])
        assert torch.equal(packed.flatten(), results[0][-1][offsets[i] : offsets[i + 1]])


@pytest.mark.parametrize("gate", ["active", "found_inf"])
def test_what_takes_no_part_keeps_codes_and_scales_and_packs_zeros(pack_, gate):
    shape = 70, 130
    (codes, scale), gradient = stored(shape, 0), torch.full(shape, torch.nan)
    before = codes.clone(), scale.clone()
    options = {"active": torch.tensor([False])} if gate == "active" else {"found_inf": torch.tensor(1.0)}
    assert not packed_by(pack_, codes, scale, gradient, **options).any()
    assert torch.equal(codes, before[0]) and torch.equal(scale, before[1])


def arguments(**changes) -> dict:
    codes, scales = zip(*(stored((3, 100), i) for i in range(2)))
    same = {"momentum": list(codes), "momentum_scale": list(scales), "gradient": [torch.ones(3, 100)] * 2}
    return {**same, "packed": torch.ones(2, 3, 100), "beta": BETA, "nesterov": True, **changes}


@pytest.mark.parametrize("closed", [0, 1])
def test_each_matrix_has_a_gate_of_its_own(pack_, closed):
    keywords = arguments()
    before = [(codes.clone(), scale.clone()) for codes, scale in zip(keywords["momentum"], keywords["momentum_scale"])]
    pack_(**keywords, active=torch.arange(2) != closed)
    for i, (codes, scale) in enumerate(before):
        kept = torch.equal(keywords["momentum"][i], codes), torch.equal(keywords["momentum_scale"][i], scale)
        assert kept == (i == closed,) * 2 and keywords["packed"][i].any() == (i != closed)


# Made in the test, where the default device is that of the test.
BAD = {
    "one per matrix": lambda: {"momentum_scale": [torch.ones(3, 2)]},
    r"momentum_scale\[1\] must have an element for each 64": lambda: {
        "momentum_scale": [torch.ones(3, 2), torch.ones(3, 1)]
    },
    r"64 of a row or of a column of \(3, 100\), got \(4, 2\)": lambda: {"momentum_scale": [torch.ones(4, 2)] * 2},
    r"64 of a row or of a column of \(3, 100\), got \(1, 99\)": lambda: {"momentum_scale": [torch.ones(1, 99)] * 2},
    r"64 of a row or of a column of \(3, 100\), got \(2, 100\)": lambda: {"momentum_scale": [torch.ones(2, 100)] * 2},
    r"momentum_scale\[0\] must be a matrix": lambda: {"momentum_scale": [torch.ones(3), torch.ones(3, 2)]},
    r"momentum\[0\] must be Char and momentum_scale\[0\] Float": lambda: {"momentum": [torch.ones(3, 100)] * 2},
    r"must be Char and momentum_scale\[0\] Float": lambda: {"momentum_scale": [torch.ones(3, 2).double()] * 2},
    "float32, float64": lambda: {"momentum_scale": None},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_raise_and_nothing_is_written(pack_, message):
    keywords = arguments(**BAD[message]())
    before = [x.clone() for x in keywords["momentum"]]
    with pytest.raises(RuntimeError, match=message):
        pack_(**keywords)
    assert all(torch.equal(a, b) for a, b in zip(keywords["momentum"], before))
    with pytest.raises(RuntimeError, match=r"momentum_scale\[\d\] must not share|must not share.*momentum_scale"):
        shared = torch.ones(3, 2)
        pack_(**arguments(momentum_scale=[shared, shared]))


def test_the_operation_keeps_torchs_rules_for_operators(kernel):
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(kernel.kernels.native.momentum_pack_.default, (), arguments(), test_utils=utilities)
