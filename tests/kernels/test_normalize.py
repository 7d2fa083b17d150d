"""The compiled norm and the pass that divides by it: right, and the same bits however they are called."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.support import oracles
from tests.support.operation_places import MODELLED, SHIPPED, on_every_place

DTYPES = torch.float32, torch.bfloat16, torch.float16
# The longest has more tiles than a block on a GPU has threads, which add up what the tiles have.
SHAPES = (1, 1, 1), (3, 5, 7), (2, 70, 40), (2, 3, 9000), (2, 2, 16_500), (1, 300, 700), (5, 1, 130)
EPS, SCALE = 1e-7, 4.0
# The multiplier and the product are rounded to float32.
ROUNDINGS = 2 * oracles.unit_roundoff(torch.float32)

pytestmark = [pytest.mark.usefixtures("device"), on_every_place(SHIPPED, MODELLED)]


def random(shape, dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device(), dtype)


def laid_out(X: Tensor) -> list[Tensor]:
    """Return X (B, m, n) in memory by rows, by columns, with gaps between rows, and with gaps between matrices."""
    wider = torch.cat([X, X], 2)[:, :, : X.size(2)]
    spaced = torch.cat([X.flatten(1), X[:, 0, :1]], 1)[:, :-1].unflatten(1, X.shape[1:])
    return [X, X.mT.contiguous().mT, wider, spaced]


@pytest.fixture
def normalized(native):
    """Norms and normalized matrices or rows, in memory that was filled with NaN."""

    def normalized(
        X: Tensor, dtype: torch.dtype = torch.bfloat16, eps: float = EPS, rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        norms = torch.full(X.shape[: 1 + rows], torch.nan, dtype=torch.float64)
        out = torch.full(X.shape, torch.nan, dtype=dtype)
        native.frobenius_norm_(norms, X)
        native.normalize_(out, X, norms, eps, SCALE)
        return norms, out

    return normalized


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_and_quotients_err_by_their_roundings(normalized, shape, dtypes):
    X = random(shape, dtypes[0])
    norms, out = normalized(X, dtypes[1])
    exact_norms, exact = oracles.normalize(X, EPS, SCALE)
    # Squares are exact, sums of as many as there are elements are not.
    summing = X[0].numel() * 2.0**-53 * exact_norms
    assert ((norms - exact_norms).abs() <= summing).all()
    allowed = ROUNDINGS * exact.abs()
    assert ((out.double() - exact).abs() <= allowed + oracles.rounding_error(exact.abs() + allowed, dtypes[1])).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [False, True], ids=("matrices", "rows"))
@pytest.mark.parametrize("shape", [(5, 130, 350), (5, 136, 352)], ids=str)
def test_neither_batch_threads_nor_strides_change_a_bit(normalized, shape, dtype, rows):
    X = random(shape, dtype)
    torch.set_num_threads(1)
    expected = normalized(X, rows=rows)
    for count in 2, 3, 16:
        torch.set_num_threads(count)
        for other in laid_out(X):
            assert all(map(torch.equal, normalized(other, rows=rows), expected))
        alone = [normalized(x, rows=rows) for x in X.split(1)]
        assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(zip(*alone), expected))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 70, 128), (2, 3, 9000), (2, 130, 1), (2, 0, 3), (2, 3, 0)], ids=str)
def test_a_row_has_the_bits_of_a_matrix_of_one_row(normalized, shape, dtype):
    X = random(shape, dtype)
    norms, out = normalized(X, rows=True)
    expected_norms, expected = normalized(X.reshape(shape[0] * shape[1], 1, shape[2]))
    assert torch.equal(norms.flatten(), expected_norms) and torch.equal(out.flatten(0, 1), expected[:, 0])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [False, True], ids=("matrices", "rows"))
@pytest.mark.parametrize("shape", [(2, 70, 136), (2, 72, 136)], ids=str)
def test_a_result_may_replace_what_is_divided(normalized, native, shape, rows, dtype):
    X = random(shape, dtype)
    norms, expected = normalized(X, dtype, rows=rows)
    for dividend in laid_out(X.clone()):
        native.normalize_(dividend, dividend, norms, EPS, SCALE)
        assert torch.equal(dividend, expected)


@pytest.mark.parametrize("shape", [(3, 70, 130), (3, 72, 136), (2, 1, 5000), (2, 5000, 1), (2, 0, 3)], ids=str)
def test_the_order_of_rows_and_columns_changes_no_bit(native, shape):
    X = random(shape, torch.float32)
    norms = torch.linspace(0.5, 2, shape[0], dtype=torch.float64)
    expected = torch.stack([x * (SCALE / norm).float() for x, norm in zip(X, norms)]).to(torch.bfloat16)
    for dividend, out in itertools.product((X, X.mT.contiguous().mT), (expected, expected.mT.contiguous().mT)):
        out = torch.empty_like(out).fill_(torch.nan)
        native.normalize_(out, dividend, norms, EPS, SCALE)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("power", [-90, -20, 20, 100])
def test_a_power_of_two_changes_no_bit(normalized, power):
    X = random((2, 40, 90), torch.float32)
    norms, out = normalized(X, eps=0.0)
    scaled_norms, scaled = normalized(X * 2.0**power, eps=0.0)
    assert torch.equal(scaled, out)
    assert torch.equal(scaled_norms, norms * 2.0**power)


@pytest.mark.kernels_ci
def test_zeros_stay_zeros_and_a_nan_stays_in_its_matrix(normalized):
    X = random((3, 40, 90), torch.float32)
    X[0], X[1, 3, 4] = 0, torch.nan
    norms, out = normalized(X, eps=0.0)
    assert norms[0] == 0 and (out[0] == 0).all()
    assert norms[1].isnan() and out[1].isnan().all()
    assert torch.equal(out[2:], normalized(X[2:], eps=0.0)[1])


def test_norms_below_eps_are_divided_by_eps(normalized):
    X = random((1, 8, 8), torch.float32) * 1e-12
    assert torch.equal(normalized(X, torch.float32, eps=0.5)[1], X * (SCALE / 0.5))


def test_norms_below_the_least_normal_number_are_divided_by_that(native):
    X, norms = torch.full((1, 1, 1), 2.0**-130), torch.zeros(1, dtype=torch.float64)
    out = torch.empty_like(X)
    native.frobenius_norm_(norms, X)
    native.normalize_(out, X, norms, 0.0, 1.0)
    assert norms.item() == 2.0**-130 and out.item() == 2.0**-4


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_sizes_may_be_zero(normalized, shape):
    norms, out = normalized(torch.ones(shape))
    assert (norms == 0).all() and out.shape == shape


X = torch.ones(2, 3, 4)
NORMS = torch.ones(2, dtype=torch.float64)
OVERLAPPING = torch.ones(25)[:-1].view(2, 3, 4)
SQUARES = torch.ones(2, 4, 4)
HALVES = torch.ones(2, 3, 4, dtype=torch.bfloat16)
SHARED = (memory := torch.ones(2, 3, 4)), memory.view(torch.float64).flatten()[2:4]
BAD = {
    "X must be float32, float16 or bfloat16": (X.clone(), X.double(), NORMS, EPS),
    "X must be .batch": (X.clone(), X[0], NORMS, EPS),
    r"X must be .batch, rows, cols., got \(2, 3, 4, 1\)": (X.clone(), X[..., None], NORMS, EPS),
    r"out must be .batch, rows, cols., got \(2, 3, 4, 1\)": (X[..., None].clone(), X, NORMS, EPS),
    r"out must have the shape \(2, 3, 4\)": (torch.ones(2, 4, 3), X, NORMS, EPS),
    r"out must have the shape \(2, 3, 4\) of X, got \(3": (torch.ones(3, 3, 4), X, NORMS, EPS),
    r"out must have the shape \(2, 3, 4\) of X, got \(2, 3, 5\)": (torch.ones(2, 3, 5), X, NORMS, EPS),
    "norms must be float64": (X.clone(), X, NORMS.float(), EPS),
    r"norms must be \(2\), contiguous, got \(1\)": (X.clone(), X, NORMS[:1], EPS),
    r"norms must be \(2\), contiguous, got \(3\)": (X.clone(), X, torch.ones(3, dtype=torch.float64), EPS),
    r"norms must be \(2\), contiguous, got \(2\)": (X.clone(), X, torch.ones(4, dtype=torch.float64)[::2], EPS),
    "eps must be at least 0": (X.clone(), X, NORMS, -1.0),
    "eps must be at least 0, got nan": (X.clone(), X, NORMS, math.nan),
    r"norms of rows must be \(2, 3\), contiguous, got \(2, 4\)": (X.clone(), X, torch.ones(2, 4).double(), EPS),
    r"norms of rows must be \(2, 3\), contiguous, got \(3, 3\)": (X.clone(), X, torch.ones(3, 3).double(), EPS),
    r"norms must be \(2\), contiguous, got \(2, 1, 1\)": (X.clone(), X, torch.ones(2, 1, 1).double(), EPS),
    r"norms of rows must be \(2, 3\), contiguous, got \(2, 3\)": (X.clone(), X, torch.ones(3, 2).double().mT, EPS),
    "norms must be float64 on": (X.clone(), X, torch.ones(2, 3), EPS),
    "out and X must not share memory": (
        OVERLAPPING,
        OVERLAPPING.view(-1).as_strided((2, 3, 4), (12, 4, 1), 1),
        NORMS,
        EPS,
    ),
    "out and X must not share memory: ": (SQUARES, SQUARES.mT, NORMS, EPS),
    "out and X must not share memory: out is written": (HALVES, HALVES.view(torch.float16), NORMS, EPS),
    "out and norms must not share memory": (SHARED[0], X, SHARED[1], EPS),
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_raise_and_nothing_is_written(native, message):
    out, dividend, norms, eps = BAD[message]
    with pytest.raises(RuntimeError, match=message):
        native.normalize_(out, dividend, norms, eps, SCALE)
    assert (out == 1).all()


def test_norms_share_no_memory_with_their_matrices(native):
    with pytest.raises(RuntimeError, match="X and norms must not share memory: norms is written"):
        native.frobenius_norm_(SHARED[1], SHARED[0])


def test_the_operations_keep_torchs_rules_for_operators(native):
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(native.frobenius_norm_.default, (NORMS.clone(), X), test_utils=utilities)
    torch.library.opcheck(native.normalize_.default, (X.clone(), X, NORMS, EPS, SCALE), test_utils=utilities)
