"""The operations in torch's functions come as close to the compiled ones as their missing fused products allow.

u is the roundoff of the arithmetic, float32's or float64's. Where the compiled operations round a product and a sum
together, the portable ones round twice. Results that are stored in a narrower dtype may differ by its spacing besides:
two numbers, however close, may round to neighbours.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.test_descended_norms import assert_norms
from tests.kernels.test_native_ops import FLOATS, MODES, names, random
from tests.kernels.test_packed_norms import PACKED
from tests.kernels.test_quantized_momentum import stored
from tests.support import oracles
from tests.support.narrow_device import narrow_device

OPERATIONS = (
    "momentum_pack_",
    "descend_",
    "move_blocks_",
    "frobenius_norm_",
    "normalize_",
    "gemm_",
    "newton_schulz_",
    "gram_newton_schulz_",
    "gemm_instructions",
    "hopper_gemm_",
)
BETA, LR, DECAY, MULTIPLIER = 0.95, 0.3, 0.1, 1.5


@pytest.mark.kernels_ci
def test_a_variant_without_a_library_has_the_same_operations_by_names_of_its_own(both):
    compiled, portable = both
    assert portable.IS_PORTABLE and portable.PREFIX == "portable_"
    for name in OPERATIONS:
        ours, theirs = (getattr(native.ops, native.PREFIX + name).default._schema for native in (portable, compiled))
        assert str(ours).removeprefix(f"{portable.ops.name}::portable_") == str(theirs).removeprefix(
            f"{compiled.ops.name}::{compiled.PREFIX}"
        )


def test_no_matrices_need_no_numbers_on_their_device(portable_kernel):
    """`active` has one entry for each, so none."""
    with narrow_device(portable_kernel, "mps") as narrow:
        packed = torch.empty(0, 3, 4, device=narrow.device)
        portable_kernel.kernels.native.momentum_pack_([], [], packed, 0.9, True, active=torch.ones(0, dtype=torch.bool))


def spacing(values: Tensor, dtype: torch.dtype, computing: torch.dtype) -> Tensor | float:
    """Return how far neighbours in `dtype` are apart around values; 0 if results are not rounded to it any more."""
    return 2 * oracles.rounding_error(values.double(), dtype) if dtype.itemsize < computing.itemsize else 0.0


def pack_errors(m: Tensor, g: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """Return how far momentum and direction may be from the compiled ones before they are stored, to first order in u.

    With d = g - m and m' = m + w d, the portable product w d is rounded, and so are both sums: e = u (w |d| + 2 |m'|).
    With d' = g - m', rounded in both, m' + w d' differs by e, by three roundings of w d', and by those of both sums.
    """
    m, g, weight = m.double(), g.double(), 1 - BETA
    average = m + weight * (g - m)
    direction = average + weight * (g - average)
    first = u * (weight * (g - m).abs() + 2 * average.abs())
    return first, first + u * (3 * weight * (g - average).abs() + 2 * direction.abs())


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=3)), ids=names)
def test_momentum_and_direction_are_as_close_as_their_roundings(both, dtypes):
    momentum, gradient = random((130, 70), dtypes[0], 0), random((130, 70), dtypes[1], 1)
    unit, computing = oracles.unit_roundoff(*dtypes), torch.float64 if torch.float64 in dtypes else torch.float32
    options = {"maximize": True, "grad_scale": torch.tensor(3.0), "found_inf": torch.zeros(1)}
    results = []
    for native in both:
        kept, packed = momentum.clone(), torch.full((1, 130, 70), torch.nan, dtype=dtypes[2])
        native.momentum_pack_([kept], [gradient], packed, BETA, True, **options)
        results.append((kept.double(), packed[0].double()))
    errors = pack_errors(momentum, gradient.double() / -3, unit)
    for compiled, portable, error, dtype in zip(*results, errors, (dtypes[0], dtypes[2])):
        # The quotient of the gradient is rounded alike in both. The factor is what is left out to first order.
        allowed = 1.01 * error + spacing(compiled, dtype, computing)
        assert ((compiled - portable).abs() <= allowed).all()


def descended(native, parameter: Tensor, update: Tensor, mode: int, options: dict) -> Tensor:
    """Return a parameter after a descent; a master as float32, if `options` have a remainder."""
    parameter = parameter.clone()
    options = {name: [r.clone() for r in x] if name == "remainder" else x for name, x in options.items()}
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (LR, DECAY, MULTIPLIER))
    native.descend_([parameter], update[None], *numbers, mode, **options)
    if "remainder" not in options:
        return parameter
    return ((parameter.view(torch.int16).int() << 16) + options["remainder"][0]).view(torch.float32)


OPTIONS = {
    "plain": {},
    "row_scale": {"row_scale": torch.linspace(0.5, 1.5, 130)},
    "seeds": {"seeds": torch.tensor([7]), "origins": [3, 5, 900]},
    "remainder": {"remainder": [torch.arange(130 * 70).view(130, 70).to(torch.int16)]},
}
DTYPES_OF = {"plain": FLOATS, "row_scale": FLOATS, "seeds": FLOATS[2:], "remainder": (torch.bfloat16,)}
DESCENTS = [
    pytest.param(name, (stored_as, update_as), id=f"{name}-{names((stored_as, update_as))}")
    for name, dtypes in DTYPES_OF.items()
    for stored_as, update_as in itertools.product(dtypes, FLOATS)
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("name", "dtypes"), DESCENTS)
def test_descent_is_as_close_as_the_roundings_of_its_operands(both, name, dtypes, mode):
    """p keep is rounded in one of them, and keep may differ by 2 u; the sum r is rounded in both, and so is its product
    with the row's factor: u (3 |p| + 2 |r| + 2 |r|), times the factor. A draw may fall between two numbers: a spacing.
    """
    parameter, update = random((130, 70), dtypes[0], 0), random((130, 70), dtypes[1], 1)
    compiled, portable = (descended(native, parameter, update, mode, OPTIONS[name]) for native in both)
    computing = torch.float64 if torch.float64 in dtypes else torch.float32
    factor = OPTIONS[name].get("row_scale", torch.ones(130)).double().view(-1, 1)
    # A master is within half a spacing of its bfloat16 parameter: 2^-8 of it, which the margin includes.
    before = oracles.descend(parameter, update, LR, DECAY, MULTIPLIER, mode).abs() + 2.0**-8 * parameter.double().abs()
    allowed = 1.01 * oracles.unit_roundoff(*dtypes) * factor * (3 * parameter.double().abs() + 4 * before)
    allowed = allowed + spacing(compiled, compiled.dtype, computing)
    assert portable.dtype == compiled.dtype and ((compiled.double() - portable.double()).abs() <= allowed).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(3, 130, 70), (3, 70, 130), (0, 3, 4), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, PACKED)), ids=names)
def test_norms_of_a_descent_are_those_of_the_pass(portable_kernel, dtypes, shape):
    parameter, update = list(random(shape, dtypes[0], 0)), random(shape, dtypes[1], 1)
    active = torch.arange(shape[0]) != 1
    for laid_out in update, update.mT.contiguous().mT:
        assert_norms(portable_kernel.kernels.native, parameter, laid_out, active=active)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_momentum_in_8_bits_has_the_same_scales_and_codes_but_for_ties(both, dtype):
    """A code is the nearest in both, but for roots that are as near to the middle of two as the operations differ.

    The compiled root is within 5e-6 of itself, at most 7e-4. Of momentum and scale a root has half the relative
    difference, less than 1e-5 here where |m| >= 0.01 M: so codes differ only where a root is within 1e-3 of a middle,
    at 2e-3 of all places; 1 % leaves room for chance.
    """
    gradient, results = random((64, 320), dtype, 1), []
    for native in both:
        codes, scale = stored((64, 320), 0)
        packed = torch.zeros(1, 64, 320)
        native.momentum_pack_([codes], [gradient], packed, BETA, True, momentum_scale=[scale])
        results.append((codes.int(), scale, packed))
    (codes, scale, packed), (other_codes, other_scale, other_packed) = results
    assert (codes - other_codes).abs().max() <= 1 and (codes != other_codes).float().mean() <= 0.01
    torch.testing.assert_close(other_scale, scale, rtol=2.0**-21, atol=0)
    before = oracles.dequantized(*stored((64, 320), 0))
    error = pack_errors(before, gradient, oracles.unit_roundoff(torch.float32))[1]
    assert ((packed[0].double() - other_packed[0].double()).abs() <= 1.01 * error + 2.0**-23 * before.abs()).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", FLOATS[:1] + FLOATS[2:], ids=str)
def test_norms_differ_by_the_order_of_their_sums_alone(both, dtype):
    """n squares, summed in any order in float64, are within n 2^-53; the multiplier and the product round alike."""
    X, results = random((3, 130, 70), dtype, 0), []
    for native in both:
        norms, out = torch.zeros(3, dtype=torch.float64), torch.zeros(3, 130, 70)
        native.frobenius_norm_(norms, X)
        native.normalize_(out, X, norms, 1e-7, 4.0)
        results.append((norms, out))
    torch.testing.assert_close(*(norms for norms, _ in results), rtol=130 * 70 * 2.0**-53, atol=0)
    torch.testing.assert_close(*(out for _, out in results), rtol=2.0**-22, atol=0)


def test_stochastic_rounding_draws_the_same_bits(both):
    """Where nothing is to be fused, the draw alone decides: parameters are zero, updates anything."""
    update = random((130, 70), torch.float32, 0)
    for dtype in torch.bfloat16, torch.float16:
        results = []
        for native in both:
            parameter = torch.zeros(130, 70, dtype=dtype)
            one = torch.ones(())
            native.descend_([parameter], update[None], one, 0 * one, one, seeds=torch.tensor([-5]), origins=[2, 9, 79])
            results.append(parameter)
        assert torch.equal(*results)


def test_blocks_are_moved_bit_by_bit(both):
    blocks = torch.tensor([[2, 1, 1, 2, 3, 2, 4, 10, 3], [1, 0, 0, 0, 4, 1, 0, 0, 1]])
    for to_buffer in True, False:
        results = []
        for native in both:
            matrices, buffer = random((3, 4, 4), torch.float32, 0), random((22,), torch.float32, 1)
            matrices[1, 1, 2] = buffer[4] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
            native.move_blocks_(matrices, buffer, blocks, to_buffer)
            results.append(torch.cat([matrices.flatten(), buffer]).view(torch.int32))
        assert torch.equal(*results)
