"""Laws of the small matrices' Triton kernel, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.test_symmetric_gemm_laws import FAR
from tests.support.small_polynomial import (
    SCALE,
    SCHEDULE,
    SIZES,
    check_polar,
    exact,
    in_windows,
    largest_error,
    matrices,
    prove_small,
    steps_of,
    whole_matrices,
)
from tests.support.symmetric_products import DTYPES, every_other

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("place")

# The third matrix is as far away as FAR's second, by strides that fit into 31 bits.
SQUARES, PLACES = ("scratch", "chip"), FAR | {"third": ((3, 5, 5), (2**30, 5, 1))}
# In each run squares are in both places, and directions are float32 alone or packed in half precision, too.
IN_EACH_RUN, PAIRS = [("scratch", torch.float32), ("chip", torch.float16)], itertools.product(SQUARES, DTYPES)
EACH = [pytest.param(*pair, marks=[pytest.mark.every_run] * (pair in IN_EACH_RUN)) for pair in PAIRS]
LENGTHS, JORDAN = [(3,), (1, 1, 1), (1, 2), (2, 1)], (3.4445, -4.775, 2.0315)


@pytest.fixture
def module(kernel):
    return importlib.import_module(f"{kernel.__name__}.kernels.gpu.small_polar")


@pytest.fixture(params=SQUARES)
def safe(request, place, tuned) -> Callable[..., tuple]:
    """The configuration of a dtype and a number of rows, with squares in scratch memory, or on the chip if one has."""

    def chosen(dtype: torch.dtype, m: int):
        targets, side = place.targets(tuned), tuned.padded_side(m)
        usual = [c for target in targets for c in tuned.usual_small_configs(target, dtype, side) if c.on_chip]
        return usual[0] if request.param == "chip" and usual else tuned.safe_small_config(targets[0], dtype, m)

    return chosen


def factors(module, G: Tensor, C: Tensor, lengths, scaling: tuple, config) -> Tensor:
    """Return C, which held NaN, with the kernel's result."""
    module.launch_small_polar(G, C.fill_(math.nan), steps_of(in_windows(SCHEDULE, lengths, SCALE)), scaling, config)
    return C


@pytest.fixture
def polar(module, safe) -> Callable[..., Tensor]:
    """The kernel's result with the configuration for its dtype and its rows."""

    def computed(G, dtype=torch.float16, lengths=(1, 2), C=None, eps=0.0) -> Tensor:
        C = torch.empty_like(G, dtype=dtype) if C is None else C
        return factors(module, G, C, lengths, (SCALE, eps, dtype), safe(dtype, G.size(1)))

    return computed


def assert_right(C: Tensor, G: Tensor, dtype, lengths) -> None:
    """Error at most what the roundings of the iteration make of it."""
    check_polar(C, G, in_windows(SCHEDULE, lengths, SCALE), SCALE, dtype)


@pytest.mark.parametrize("m, n", SIZES)
def test_the_error_is_that_of_the_iterations_roundings(polar, m, n):
    G = matrices(1, m, n)
    assert_right(polar(G), G, torch.float16, (1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_windows_of_any_length_give_the_polynomial(polar, dtype, lengths):
    G = matrices(1, 17, 40).to(dtype)
    assert_right(polar(G, dtype, lengths, C=torch.empty(1, 17, 40)), G, dtype, lengths)


@pytest.mark.parametrize("safe, dtype", EACH, indirect=["safe"], ids=str)
def test_proof_finds_nothing_wrong(module, tuned, safe, dtype):
    """Of the smallest side; the tuner asks it of every other one that it writes."""
    side = tuned.PADDED_SIDES[0]
    prove_small(lambda *arguments: module.launch_small_polar(*arguments, safe(dtype, side)), side, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_configuration_computes_the_polynomial(place, module, tuned, dtype):
    for side in tuned.PADDED_SIDES:
        G = matrices(1, side - 1, side + 3)
        usual = {config for target in place.targets(tuned) for config in tuned.usual_small_configs(target, dtype, side)}
        for config in usual | {tuned.safe_small_config(target, dtype, side) for target in place.targets(tuned)}:
            C = torch.empty_like(G, dtype=dtype)
            assert_right(factors(module, G, C, (1, 2), (SCALE, 0.0, dtype), config), G, dtype, (1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_operation_on_a_cpu_rounds_where_the_kernel_does(polar, module, dtype, lengths):
    """Another order of sums turns few roundings. Of at most 11 equal ones each makes 1/√11 of the error, above 1/4."""
    G, other = matrices(1, 17, 31), torch.empty(1, 17, 31, device="cpu")
    module.small_polar_(G.cpu(), other, steps_of(in_windows(SCHEDULE, lengths, SCALE)), SCALE, 0.0, dtype)
    factor = polar(G, dtype, lengths, torch.empty(1, 17, 31)).cpu()
    assert torch.linalg.vector_norm(factor - other) <= torch.linalg.vector_norm(other[0] - exact(G[0], SCHEDULE)) / 4


def test_a_result_in_float32_is_rounded_no_further(polar):
    G = matrices(1, 24, 31)
    wide = polar(G, C=torch.empty(1, 24, 31))
    assert not torch.equal(wide.half().float(), wide)
    assert torch.equal(wide.half(), polar(G))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("exponent", [-110, 100])
def test_a_power_of_two_changes_no_bit(polar, dtype, exponent):
    """1e30 is about 2 ** 100: no square of it is finite, and none of its inverse is more than zero."""
    G = matrices(1, 17, 40).to(dtype)
    assert torch.equal(polar(G.double().mul(2.0**exponent).to(dtype)), polar(G))


def test_the_largest_and_smallest_numbers_have_a_norm(polar):
    largest = torch.finfo(torch.float32).max * torch.ones(1, 3, 5)
    assert_right(polar(largest), largest, torch.float16, (1, 2))
    smallest = torch.finfo(torch.float32).tiny * torch.eye(3)[None]
    assert_right(polar(smallest), smallest, torch.float16, (1, 2))
    assert polar(1e-3 * smallest).isfinite().all()  # whose norm has lost digits


def test_a_zero_matrix_gives_zeros_with_any_eps(polar):
    for eps in (0.0, 1e-7, 1e30):
        assert torch.equal(polar(torch.zeros(1, 3, 5), eps=eps), torch.zeros(1, 3, 5, dtype=torch.float16))


def test_a_matrix_of_smaller_norm_than_eps_is_divided_by_eps(polar):
    G = matrices(1, 17, 40)
    norm = torch.linalg.matrix_norm(G.double()).item()
    small = polar(G, torch.float32, (1, 1, 1), eps=4 * norm)
    expected = exact(G[0], in_windows(SCHEDULE, [3], 4.0)[0])  # steps that do with 4 X what SCHEDULE does with X
    bound = largest_error(G[0], in_windows(SCHEDULE, (1, 1, 1), SCALE), SCALE, torch.float32)
    assert torch.linalg.matrix_norm(small[0].double().cpu() - expected) <= bound
    assert torch.equal(polar(G, eps=norm / 2), polar(G))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_matrix(polar, bad):
    G = matrices(3, 17, 40)
    clean = polar(G)
    G[1, 3, 20] = bad
    C = polar(G)
    assert C[1].isnan().all()
    assert torch.equal(C[::2], clean[::2])


def test_a_matrix_gets_the_same_bits_alone_and_in_a_batch(polar):
    G = matrices(3, 40, 70)
    together = polar(G)
    for i in range(3):
        assert torch.equal(polar(G[i : i + 1]), together[i : i + 1])


def test_each_matrix_has_a_part_of_the_scratch_to_itself(polar, monkeypatch):
    """And reads none of it that it has not written."""
    G, C = matrices(3, 17, 40), torch.zeros(3, 17, 40, dtype=torch.float16)
    expected, empty, made = polar(G), torch.empty, []

    def poisoned(*size, **options):
        made.append(empty(*size, **options).fill_(math.nan))
        return made[-1]

    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.equal(polar(G, C=C), expected)
    (scratch,) = made
    assert scratch.isfinite().all() and len(scratch.view(3, -1).unique(dim=0)) == 3


@pytest.mark.parametrize("m, n", [(1, 7), (17, 33), (33, 130)])
def test_every_entry_is_written_and_nothing_around_it(polar, m, n):
    G = matrices(2, m, n)
    buffer = torch.full((4, 2 * n + 5, 3 * n + 4), 7.0, dtype=torch.float16)
    for C in buffer[1:3, 1 : 2 * m + 1 : 2, 2 : 3 * n + 2 : 3], buffer[1:3, 1 : n + 1, 2 : m + 2].mT:
        buffer.fill_(7.0)
        assert polar(G, C=C).isfinite().all()
        C.fill_(7.0)
        assert (buffer == 7.0).all()


def test_strides_do_not_change_a_bit_but_of_the_norm(polar):
    """Norms are exact here. Others depend on the order of their sum, which follows from strides on a GPU."""
    G = whole_matrices(2, 17, 40)
    contiguous = polar(G)
    for view in (G.mT.contiguous().mT, every_other(G), every_other(G.mT.contiguous()).mT):
        for C in torch.empty_like(view, dtype=torch.float16), every_other(contiguous):
            assert torch.equal(polar(view, C=C), contiguous)


@pytest.mark.parametrize("m, n", [(1, 7), (3, 33), (33, 47)])
def test_nothing_is_read_behind_a_matrix(place, polar, m, n):
    G = whole_matrices(2, m, n)
    assert torch.equal(polar(place.guarded(G)), polar(G))
    assert torch.equal(polar(place.guarded(G.mT.contiguous()).mT), polar(G))


@pytest.mark.parametrize("far", PLACES)
def test_offsets_need_more_than_31_bits(place, polar, far):
    shape, strides = PLACES[far]
    G, C = (place.sparse(2**31 + 2**21).as_strided(shape, strides) for _ in range(2))
    X = G.copy_(whole_matrices(*shape)).contiguous()
    assert torch.equal(polar(G, C=C), polar(X))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)], ids=str)
def test_no_matrices_rows_or_columns_are_no_work(polar, shape):
    assert polar(torch.empty(shape)).shape == shape


def test_padding_does_not_grow_with_the_steps(module, safe):
    """The product of these steps is more than float16 holds where a singular value is zero, as it is of padded rows."""
    G, steps = matrices(1, 1, 7), steps_of([10 * [JORDAN], [JORDAN]])
    C = torch.empty_like(G)
    module.launch_small_polar(G, C, steps, (1.0, 0.0, torch.float16), safe(torch.float16, 1))
    assert C.isfinite().all()


def test_more_rows_than_columns_are_a_matrix_too(polar):
    """Its Gram matrix is singular, but the polynomial of it is the same."""
    G = matrices(1, 40, 17)
    assert_right(polar(G, torch.float32, (1, 1, 1)), G, torch.float32, (1, 1, 1))


def test_each_step_has_its_own_coefficients(module, safe):
    """The first steps of a schedule and the others, one after the other, are the whole of it."""
    G, steps = matrices(1, 17, 40), steps_of(in_windows(SCHEDULE, (1, 1, 1), 1.0))
    X, results = G / torch.linalg.matrix_norm(G).item(), []
    for part in itertools.accumulate([steps[:4], steps[4:8], steps[8:]]):
        results.append(torch.empty_like(G))
        module.launch_small_polar(G, results[-1], part, (1.0, 0.0, torch.float32), safe(torch.float32, 17))
    for C, (a, b, c) in zip(results, SCHEDULE):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
        torch.testing.assert_close(C, X, rtol=1e-4, atol=1e-5)
