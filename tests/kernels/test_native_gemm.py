"""Products on a CPU: right within a derived error, and the same bits however they are shared out among threads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.support.gemm_kinds import FLOAT32, KINDS, WIDER_KINDS, Kind, name_of, skip_unless_here

PLAIN = 1.0, 0.0  # alpha, beta
# Parts of a block, whole ones, more than one go along k, more than one part of a result.
SHAPES = (1, 1, 1), (7, 17, 1), (17, 7, 33), (33, 65, 100), (64, 32, 320), (100, 33, 768), (300, 600, 700)
LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x, x], 2)[:, :, x.size(2) : 2 * x.size(2)],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.fixture(params=KINDS + WIDER_KINDS, ids=name_of)
def kind(request, native) -> Kind:
    """Each instruction set that is here."""
    skip_unless_here(native, request.param)
    return request.param


@pytest.fixture
def gemm(native, kind):
    """The operation with a result of its own, filled with NaN before."""

    def product(A, B, D=None, numbers=PLAIN, symmetric=False):
        C = torch.full((len(A), A.size(1), B.size(2)), torch.nan, dtype=kind.result)
        addend = None if D is None else D.to(kind.result)
        native.gemm_(C, A, B, addend, *numbers, symmetric, kind.instructions)
        return C

    return product


def within_error(C: Tensor, A: Tensor, B: Tensor, D=None, numbers=PLAIN) -> bool:
    """Whether C is the product up to 2 k + 2 roundings to float32, none above the sum of sizes, and one to C's dtype.

    Products and sums may be rounded one by one, and a run of k is summed for itself. Products of two bfloat16 are exact
    in float32, but tdpbf16ps and vdpbf16ps also add the two products of a pair, and cut what is below 2^-126.
    """
    (alpha, beta), A, B = numbers, A.double(), B.double()
    D = torch.zeros(C.shape, dtype=torch.float64) if D is None else D.double()
    exact = alpha * (A @ B) + beta * D
    sizes = abs(alpha) * (A.abs() @ B.abs()) + abs(beta) * D.abs()
    summing = (2 * A.size(2) + 2) * 2.0**-24 * sizes
    rounding = torch.finfo(C.dtype).eps / 2
    return bool(((C.double() - exact).abs() <= summing + rounding * (exact.abs() + summing) + 2.0**-126).all())


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_err_by_their_roundings(gemm, shape, kind):
    m, n, k = shape
    A, B, D = kind.random(2, m, k), kind.random(2, k, n, seed=1), kind.random(2, m, n, seed=2)
    assert within_error(gemm(A, B), A, B)
    numbers = -0.7, 1.3
    assert within_error(gemm(A, B, D, numbers), A, B, D, numbers)


def test_a_large_product_errs_by_its_roundings(native, kind):
    A, B = kind.random(1, 768, 768), kind.random(1, 768, 768, seed=1)
    C = torch.empty_like(A, dtype=kind.result)
    native.gemm_(C, A, B, None, *PLAIN, False, kind.instructions)
    assert within_error(C, A, B)


def test_the_processors_products_in_float32_are_not_rounded_before_they_are_added(gemm, kind):
    """x² = r + 2^-24, where r is the nearest number of float32: rounded before, x² - r would be 0."""
    if kind.dtype != FLOAT32 or kind.instructions == "portable":
        pytest.skip("only float32 instructions of the processor promise it")
    x, r = 1 + 2.0**-12, 1 + 2.0**-11
    assert gemm(torch.tensor([[[1.0, x]]]), torch.tensor([[[-r], [x]]])).item() == 2.0**-24


def test_what_is_added_is_not_rounded_before(gemm, kind):
    """beta D - r = 2^-24, where r is the nearest number of float32 to beta D: rounded before, it would be 0."""
    one, D = torch.ones(1, 1, 1, dtype=kind.dtype), torch.full((1, 1, 1), 1 + 2.0**-7)
    assert gemm(one, one, D, (-(1 + 2.0**-7 + 2.0**-17), 1 + 2.0**-17)).item() == 2.0**-24


def test_the_processors_sums_in_float32_lose_no_more_than_the_first_go(gemm, kind):
    """2^24 + 1 is 2^24 in float32, so the ones that are added to it one by one are lost: at most those of 256 k."""
    if kind.dtype != FLOAT32:
        pytest.skip("sums of bfloat16 go on from one go to the next")
    k = 4200
    B = torch.ones(1, k, 1)
    B[0, 0] = 2.0**24
    assert abs(gemm(torch.ones(1, 1, k), B).double().item() - (2**24 + k - 1)) <= 256


def test_vectors_of_both_widths_give_the_same_bits(native):
    if native.gemm_instructions(FLOAT32) != "avx512":
        pytest.skip("this processor has no avx512")
    avx2 = Kind(FLOAT32, "avx2", FLOAT32)
    A, B = avx2.random(2, 70, 600), avx2.random(2, 600, 50, seed=1)
    results = [torch.full((2, 70, 50), torch.nan) for _ in range(2)]
    for C, name in zip(results, ("avx512", "avx2")):
        native.gemm_(C, A, B, None, *PLAIN, False, name)
    assert torch.equal(*results)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids="-".join)
@pytest.mark.parametrize("shape", [(17, 7, 33), (64, 96, 352)], ids=str)
def test_strides_change_no_bit(gemm, shape, layouts, kind):
    m, n, k = shape
    A, B = kind.random(1, m, k).expand(3, m, k), kind.random(1, k, n, seed=1).expand(3, k, n)
    D = kind.random(3, m, n, seed=2)
    expected = gemm(A.contiguous(), B.contiguous(), D, (1.0, 0.5))
    wide = torch.cat([D, D], 2)[:, :, :n]
    assert torch.equal(gemm(LAYOUTS[layouts[0]](A), LAYOUTS[layouts[1]](B), wide, (1.0, 0.5)), expected)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_wider_result_rounds_to_the_narrow_one(native, kind, symmetric):
    """The sums are the same; only the last rounding differs."""
    if kind.result == kind.dtype:
        pytest.skip("this result is not wider")
    X = kind.random(2, 70, 400)
    wide, narrow = (torch.empty(2, 70, 70, dtype=dtype) for dtype in (kind.result, kind.dtype))
    for C in wide, narrow:
        native.gemm_(C, X, X.mT, None, 0.7, 0.0, symmetric, kind.instructions)
    assert torch.equal(wide.to(kind.dtype), narrow) and not torch.equal(wide, narrow.float())


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (64, 352), (300, 40)], ids=str)
def test_symmetric_products_are_the_lower_halves_mirrored(gemm, shape, kind):
    """Also of a product that is not symmetric itself: nothing of its upper half is left."""
    m, k = shape
    X, Y, D = kind.random(2, m, k), kind.random(2, k, m, seed=1), kind.random(2, m, m, seed=2)
    for B in X.mT, Y:
        whole, half = (gemm(X, B, D, (0.5, -2.0), symmetric) for symmetric in (False, True))
        assert torch.equal(half, whole.tril() + whole.tril(-1).mT)


@pytest.mark.parametrize("shape", [(8, 8, 8), (70, 40, 340), (40, 40, 4200), (400, 300, 200)], ids=str)
def test_neither_batch_nor_threads_change_a_bit(gemm, shape, kind):
    m, n, k = shape
    A, B, S = kind.random(9, m, k), kind.random(9, k, n, seed=1), kind.random(9, m, m, seed=2)
    results = []
    for count in 1, 2, 3, 16:
        torch.set_num_threads(count)
        results.append((gemm(A, B), gemm(S, S.mT, symmetric=True)))
        alone = [(gemm(a, b), gemm(s, s.mT, symmetric=True)) for a, b, s in zip(A.split(1), B.split(1), S.split(1))]
        results.append(tuple(torch.cat(part) for part in zip(*alone)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_sums_depend_on_k_alone(gemm, kind):
    """The corner of a large product is the product of the corners' rows and columns."""
    A, B = kind.random(1, 600, 700), kind.random(1, 700, 650, seed=1)
    assert torch.equal(gemm(A, B)[:, 40:73, 550:], gemm(A[:, 40:73], B[:, :, 550:]))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str)
def test_sizes_may_be_zero(gemm, shape, kind):
    b, m, n, k = shape
    A, B, D = (torch.ones(b, *sizes, dtype=kind.dtype) for sizes in ((m, k), (k, n), (m, n)))
    C = gemm(A, B, D, (1.0, 2.0))
    assert torch.equal(C, torch.full((b, m, n), 2.0 + k, dtype=kind.result))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_row_and_matrix(gemm, value, kind):
    """Also where a block is filled up with zeros: zero times infinity must reach no result."""
    A, B = kind.random(3, 40, 50), kind.random(3, 50, 45, seed=1)
    expected = gemm(A, B)
    A[1, 33, 49] = value
    C = gemm(A, B)
    assert not C[1, 33].isfinite().any()
    C[1, 33] = expected[1, 33]
    assert torch.equal(C, expected)


@pytest.mark.parametrize("beyond", [torch.nan, torch.inf])
def test_nothing_beyond_the_operands_is_multiplied(gemm, beyond, kind):
    A, B = (torch.full((1, 64, 64), beyond, dtype=kind.dtype) for _ in range(2))
    A[:, :33, :35], B[:, :35, :40] = kind.random(1, 33, 35), kind.random(1, 35, 40, seed=1)
    transposed = A.mT.contiguous().mT, B.mT.contiguous().mT
    for left, right in (A, B), transposed:
        operands = left[:, :33, :35], right[:, :35, :40]
        assert torch.equal(gemm(*operands), gemm(*(x.contiguous() for x in operands)))
        assert gemm(*operands).isfinite().all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_nothing_is_written_outside_of_the_result(native, kind, symmetric):
    around = torch.full((4, 60, 61), 7.0, dtype=kind.result)
    C, A = around[1:3, 5:50, 9:54], kind.random(2, 45, 70)
    native.gemm_(C, A, A.mT, None, *PLAIN, symmetric, kind.instructions)
    assert within_error(C.contiguous(), A, A.mT)
    C.fill_(7)
    assert (around == 7).all()


def test_d_may_be_an_operand(gemm, kind):
    A, X, numbers = kind.random(2, 50, 50), kind.random(2, 50, 70, seed=1), (2.0, 3.0)
    assert torch.equal(gemm(A, X, X, numbers), gemm(A, X, X.clone(), numbers))
    assert torch.equal(gemm(A, A, A, numbers), gemm(A, A.clone(), A.clone(), numbers))


def test_torchs_products_before_and_after_ours_keep_their_bits(gemm, kind):
    """Both configure the AMX of a thread, and a library may rely on finding its configuration again."""
    torch.set_num_threads(2)
    shapes = (64, 64, 64), (100, 70, 40), (256, 256, 256), (16, 500, 33)
    pairs = [(kind.random(m, k), kind.random(k, n, seed=1)) for m, n, k in shapes]
    alone = [torch.mm(a, b) for a, b in pairs]
    ours = [gemm(a[None], b[None]) for a, b in pairs]
    large = kind.random(2, 300, 300)
    for _ in range(3):
        for (a, b), expected, product in zip(pairs, alone, ours):
            gemm(large, large)
            assert torch.equal(torch.mm(a, b), expected)
            assert torch.equal(gemm(a[None], b[None]), product)
            assert torch.equal(torch.mm(a, b), expected)


@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (100, 33), (352, 700)], ids=str)
def test_b_and_d_may_be_replaced_by_the_result(native, kind, shape):
    """Columns are packed before they are overwritten, whoever computes them."""
    if kind.result != kind.dtype:
        pytest.skip("a wider result is no operand")
    A, X = kind.random(3, shape[0], shape[0]), kind.random(3, *shape, seed=1)
    expected = torch.empty_like(X)
    native.gemm_(expected, A, X, X, 2.0, -0.5, False, kind.instructions)
    for count in 1, 2, 5:
        torch.set_num_threads(count)
        replaced = X.clone()
        native.gemm_(replaced, A, replaced, replaced, 2.0, -0.5, False, kind.instructions)
        assert torch.equal(replaced, expected)


@pytest.mark.parametrize("kind, rows", [(KINDS[2], 1600), (KINDS[5], 4128)], ids=["bfloat16", "float32"])
def test_so_many_rows_may_be_replaced_as_are_not_packed_at_once(native, kind, rows):
    """Elsewhere a thread packs B part by part, some of it after it has written the first rows of the result."""
    A, X, expected = kind.random(1, rows, rows), kind.random(1, rows, 30), torch.empty(1, rows, 30, dtype=kind.dtype)
    for C, threads in (expected, 2), (X, 1):  # one thread has all rows, more than it sums at once
        torch.set_num_threads(threads)
        native.gemm_(C, A, X, X, 1.0, 2.0, False, kind.instructions)
    assert torch.equal(X, expected)


def test_products_in_two_threads_of_a_program_keep_their_bits(gemm, kind):
    """One of them has the library's threads, the other works alone."""
    A, B = kind.random(4, 200, 300), kind.random(4, 300, 250, seed=1)
    expected = gemm(A, B)
    with ThreadPoolExecutor(2) as two:
        assert all(torch.equal(result, expected) for result in two.map(lambda _: gemm(A, B), range(40)))
