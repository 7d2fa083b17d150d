"""Laws of the small matrices' Triton kernel in Triton's interpreter; `test_small_polar.py` runs this file.

It has a process of its own, because TRITON_INTERPRET=1 must be set before Triton is imported and because an access out
of bounds ends the process.
"""

from __future__ import annotations

import importlib
import itertools
import math

import kernels
import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted_symmetric_gemm import FAR, before_the_end_of, every_other
from tests.support import triton_interpreter
from tests.support.small_polynomial import SCHEDULE, SIZES, exact, in_windows, largest_error, matrices, steps_of

triton_interpreter.repair_bfloat16()
PACKAGE = kernels.get_kernel("org/optimizer", version=1, trust_remote_code=True)
SMALL = importlib.import_module(f"{PACKAGE.__name__}.kernels.small_polar")
TUNED = PACKAGE.kernels.tuned

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TARGETS = [TUNED.Target("cuda", 90), TUNED.Target("hip", 0)]
SCALE = 4.0
# The third matrix is as far away as FAR's second, by strides that fit into 31 bits.
PLACES = FAR | {"third": ((3, 5, 5), (2**30, 5, 1))}
LENGTHS = [(3,), (1, 1, 1), (1, 2), (2, 1)]


def polar(G, dtype=torch.float16, lengths=(1, 2), C=None, eps=0.0, config=None) -> Tensor:
    """The kernel's result, in a C that held NaN."""
    C = torch.empty_like(G, dtype=dtype) if C is None else C
    config = config or TUNED.safe_small_config(TARGETS[0], dtype, G.size(1))
    steps = steps_of(in_windows(SCHEDULE, lengths, SCALE))
    SMALL.launch_small_polar(G, C.fill_(math.nan), steps, (SCALE, eps, dtype), config)
    return C


def assert_right(C: Tensor, G: Tensor, dtype, lengths) -> None:
    """Error at most what the roundings of the iteration make of it."""
    for c, g in zip(C, G):
        error = torch.linalg.matrix_norm(c.double() - exact(g, SCHEDULE))
        assert error <= largest_error(g, in_windows(SCHEDULE, lengths, SCALE), SCALE, dtype)


@pytest.mark.parametrize("m, n", SIZES)
def test_the_error_is_that_of_the_iterations_roundings(m, n):
    G = matrices(1, m, n)
    assert_right(polar(G), G, torch.float16, (1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_windows_of_any_length_give_the_polynomial(dtype, lengths):
    G = matrices(1, 17, 40).to(dtype)
    result = polar(G, dtype, lengths, C=torch.empty(1, 17, 40))
    assert_right(result, G, dtype, lengths)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_safe_configuration_computes_the_polynomial(dtype):
    for side in TUNED.SMALL_SIDES:
        G = matrices(1, side - 1, side + 3)
        for config in {TUNED.safe_small_config(target, dtype, side - 1) for target in TARGETS}:
            assert_right(polar(G, dtype, config=config), G, dtype, (1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_operation_on_a_cpu_rounds_where_the_kernel_does(dtype, lengths):
    """Sums in float32 come in another order there, which turns a rounding here and there."""
    G = matrices(1, 17, 31)
    C, other = torch.empty(1, 17, 31), torch.empty(1, 17, 31)
    SMALL.small_polar_(G, other, steps_of(in_windows(SCHEDULE, lengths, SCALE)), SCALE, 0.0, dtype)
    assert ((polar(G, dtype, lengths, C) - other).abs() <= 2**-20).double().mean() > 0.8


def test_a_result_in_float32_is_rounded_no_further():
    G = matrices(1, 24, 31)
    wide = polar(G, C=torch.empty(1, 24, 31))
    assert not torch.equal(wide.half().float(), wide)
    assert torch.equal(wide.half(), polar(G))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("exponent", [-110, 100])
def test_a_power_of_two_changes_no_bit(dtype, exponent):
    """1e30 is about 2 ** 100: no square of it is finite, and none of its inverse is more than zero."""
    G = matrices(1, 17, 40).to(dtype)
    assert torch.equal(polar(G.double().mul(2.0**exponent).to(dtype)), polar(G))


def test_the_largest_and_smallest_numbers_have_a_norm():
    largest = torch.finfo(torch.float32).max * torch.ones(1, 3, 5)
    assert_right(polar(largest), largest, torch.float16, (1, 2))
    smallest = torch.finfo(torch.float32).tiny * torch.eye(3)[None]
    assert_right(polar(smallest), smallest, torch.float16, (1, 2))
    assert polar(1e-3 * smallest).isfinite().all()  # whose norm has lost digits


def test_a_zero_matrix_gives_zeros_with_any_eps():
    for eps in (0.0, 1e-7, 1e30):
        assert torch.equal(polar(torch.zeros(1, 3, 5), eps=eps), torch.zeros(1, 3, 5, dtype=torch.float16))


def test_a_matrix_of_smaller_norm_than_eps_is_divided_by_eps():
    G = matrices(1, 17, 40)
    norm = torch.linalg.matrix_norm(G.double()).item()
    small = polar(G, torch.float32, (1, 1, 1), eps=4 * norm)
    expected = exact(G[0], SCHEDULE, norm=4 * norm)
    bound = largest_error(G[0], in_windows(SCHEDULE, (1, 1, 1), SCALE), SCALE, torch.float32)
    assert torch.linalg.matrix_norm(small[0].double() - expected) <= bound
    assert torch.equal(polar(G, eps=norm / 2), polar(G))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_matrix(bad):
    G = matrices(3, 17, 40)
    clean = polar(G)
    G[1, 3, 20] = bad
    C = polar(G)
    assert C[1].isnan().all()
    assert torch.equal(C[::2], clean[::2])


def test_a_matrix_gets_the_same_bits_alone_and_in_a_batch():
    G = matrices(3, 40, 70)
    together = polar(G)
    for i in range(3):
        assert torch.equal(polar(G[i : i + 1]), together[i : i + 1])


def test_each_matrix_has_a_part_of_the_scratch_to_itself(monkeypatch):
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
def test_every_entry_is_written_and_nothing_around_it(m, n):
    G = matrices(2, m, n)
    buffer = torch.full((4, 2 * n + 5, 3 * n + 4), 7.0, dtype=torch.float16)
    for C in buffer[1:3, 1 : 2 * m + 1 : 2, 2 : 3 * n + 2 : 3], buffer[1:3, 1 : n + 1, 2 : m + 2].mT:
        buffer.fill_(7.0)
        assert polar(G, C=C).isfinite().all()
        C.fill_(7.0)
        assert (buffer == 7.0).all()


def test_strides_do_not_change_a_bit():
    G = matrices(2, 17, 40)
    contiguous = polar(G)
    tall = G.mT.contiguous().mT
    for view in (tall, every_other(G), every_other(G.mT.contiguous()).mT):
        for C in torch.empty_like(view, dtype=torch.float16), every_other(contiguous):
            assert torch.equal(polar(view, C=C), contiguous)


@pytest.mark.parametrize("m, n", [(1, 7), (3, 33), (33, 47)])
def test_nothing_is_read_behind_a_matrix(m, n, tmp_path):
    G = matrices(2, m, n)
    guarded = before_the_end_of(tmp_path / "G", G)
    assert torch.equal(polar(guarded), polar(G))
    assert torch.equal(polar(before_the_end_of(tmp_path / "T", G.mT.contiguous()).mT), polar(G))


@pytest.mark.parametrize("far", PLACES)
def test_offsets_need_more_than_31_bits(far, tmp_path):
    """A file with a hole in it has room for them and takes no more than the pages that are written."""
    shape, strides = PLACES[far]
    pages = [tmp_path / name for name in "GC"]
    G, C = (torch.from_file(str(p), True, 2**31 + 2**21, dtype=torch.float16) for p in pages)
    for page in pages:
        page.unlink()
    G, C = (x.as_strided(shape, strides) for x in (G, C))
    X = G.copy_(matrices(*shape)).contiguous()
    assert torch.equal(polar(G, C=C), polar(X))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)], ids=str)
def test_no_matrices_rows_or_columns_are_no_work(shape):
    assert polar(torch.empty(shape)).shape == shape


def test_padding_does_not_grow_with_the_steps():
    """The product of these steps is more than float16 holds where a singular value is zero, as it is of padded rows."""
    G = matrices(1, 1, 7)
    jordan = (3.4445, -4.775, 2.0315)
    C, config = torch.empty_like(G), TUNED.safe_small_config(TARGETS[0], torch.float16, 1)
    steps = steps_of([[jordan] * 10, [jordan]])
    SMALL.launch_small_polar(G, C, steps, (1.0, 0.0, torch.float16), config)
    assert C.isfinite().all()


def test_more_rows_than_columns_are_a_matrix_too():
    """Its Gram matrix is singular, but the polynomial of it is the same."""
    G = matrices(1, 40, 17)
    assert_right(polar(G, torch.float32, (1, 1, 1)), G, torch.float32, (1, 1, 1))


def test_each_step_has_its_own_coefficients():
    """The first steps of a schedule and the others, one after the other, are the whole of it."""
    G = matrices(1, 17, 40)
    steps = steps_of(in_windows(SCHEDULE, (1, 1, 1), 1.0))
    config = TUNED.safe_small_config(TARGETS[0], torch.float32, 17)
    norm = torch.linalg.matrix_norm(G).item()
    given, results = G / norm, []
    for part in itertools.accumulate([steps[:4], steps[4:8], steps[8:]]):
        C = torch.empty_like(G)
        SMALL.launch_small_polar(G, C, part, (1.0, 0.0, torch.float32), config)
        results.append(C)
    for C, (a, b, c) in zip(results, SCHEDULE):
        A = given @ given.mT
        given = a * given + (b * A + c * A @ A) @ given
        torch.testing.assert_close(C, given, rtol=1e-4, atol=1e-5)
