"""The proof of products: wrong ones fail, wherever they are wrong."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_proofs_and_races_draw_float32_whatever_the_default_dtype(kernel, monkeypatch, dtype):
    """In float16 the norm of a dominant row would overflow, and its matrix would be zero."""
    proof, like = kernel.tuning.proof, torch.empty(0, dtype=torch.float32)
    expected = proof.adversarial(like, 700, 700), kernel.tuning.small_proof.adversarial(64, 80)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = proof.adversarial(like, 700, 700), kernel.tuning.small_proof.adversarial(64, 80)
        assert kernel.tuning.contest.drawn(torch.device("cpu"), 2, 3).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, found, expected))
    assert (expected[0].double().norm(dim=(1, 2)) > 60).all()


@pytest.mark.parametrize("alpha", [0.5, -0.5])
@pytest.mark.parametrize("k", [100, 1100])
def test_sums_of_products_are_those_of_their_elements(kernel, k, alpha):
    """In groups of neighbours, of which the last one is shorter, and over more columns than are copied at a time."""
    roundings, proof = kernel.tuning.roundings, kernel.tuning.proof
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randint(-8, 9, shape, generator=generator).bfloat16() for shape in ((33, k), (k, 130)))
    signs = proof._signs_of_neighbours(130)
    products, (_, magnitudes) = A.double() @ B.double(), roundings.sums_of_neighbours(B, signs)
    grouped = [(products * signs.flatten()[:130])[:, i : i + 64].sum(1) for i in (0, 64, 128)]
    exact, allowed = roundings.sums_of_product(A, B, alpha, [(2.0, A[:, :1].expand(33, 130))], signs)
    addend = 2.0 * A[:, :1].double() * signs.sum(1)
    assert torch.equal(exact, alpha * torch.stack(grouped, 1) + addend)  # integers: float64 rounds nothing
    assert torch.equal(magnitudes.sum(1), B.double().abs().sum(1)) and (allowed > 0).all()
    entry, _ = roundings.product(A, B, 1.0)
    assert torch.equal(entry, products)


@pytest.mark.parametrize("m", [1, 64, 65, 300, 4096])
def test_small_results_are_compared_as_a_whole_and_of_large_ones_the_last_rows_and_some_others(kernel, m):
    """The last rows are those of a tile that is cut; the middle one is the dominant row."""
    rows = kernel.tuning.proof.checked_rows(m).tolist()
    assert rows == sorted({*rows}) and min(m, 64) - 1 <= len(rows) <= 64  # the middle one may be among the others
    assert {0, m // 2, *range(max(0, m - 32), m)} <= {*rows}


@pytest.mark.parametrize("factor", [1.5, torch.inf])
@pytest.mark.parametrize("place", [(70, 20), (229, 228), (201, 201)])
def test_a_wrong_element_in_any_row_fails_the_proof(kernel, place, factor):
    """Rows that are not compared element by element are summed, which shows an element off by a half, or infinite."""
    proof = kernel.tuning.proof
    like, (row, col) = torch.empty(0, dtype=torch.bfloat16), place
    assert row not in proof.checked_rows(300)

    def product(A, B, D, scalars):
        C = scalars[0] * A.float() @ B.float()
        C = (C if D is None else C + scalars[1] * D.float()).to(A.dtype)
        return C.tril() + C.tril(-1).mT

    def spoiled(A, B, D, scalars):
        C = product(A, B, D, scalars)
        C[:, row, col] *= factor
        C[:, col, row] = C[:, row, col]
        return C

    def applied(B, X, a):
        result = (B.float() @ X.float() + a * X.float()).to(X.dtype)
        result[:, row, col] *= factor
        return result

    operands = proof.operands_of(like, (300, 320))
    proof.prove_products(product, operands)
    with pytest.raises(proof.WrongResultError, match="times what rounding can explain"):
        proof.prove_products(spoiled, operands)
    with pytest.raises(proof.WrongResultError, match="times what rounding can explain"):
        kernel.tuning.step_proof.prove_apply(applied, like, (300, 320))


def exact(A, B, D, scalars):
    """A product that is right: summed in float64, rounded once, and symmetric."""
    C = scalars[0] * (A.double() @ B.double()) + (0 if D is None else scalars[1] * D.double())
    C = (C + scalars[2] * torch.eye(C.size(1))).to(A.dtype)
    return C.tril() + C.tril(-1).mT


def zero_beside_a_nan(C):
    return torch.where(C.isnan(), C, 0 * C) if C.isnan().any() else C


def nan_in_the_second(C):
    C[1:2, 20, 20] = torch.nan
    return C


def row_of_a_nan(C):
    return torch.where(C.isnan().any(2, keepdim=True) | C.isnan().any(1, keepdim=True), torch.nan, C)


@pytest.mark.parametrize(
    "spoil, words",
    [(zero_beside_a_nan, "changed bits outside"), (nan_in_the_second, "times what rounding can explain")],
)
def test_what_is_wrong_beside_a_nan_or_is_none_fails_the_proof(kernel, spoil, words):
    proof = kernel.tuning.proof
    operands = proof.operands_of(torch.empty(0, dtype=torch.float32), (48, 80))
    proof.prove_products(exact, operands)
    with pytest.raises(proof.WrongResultError, match=words):
        proof.prove_products(lambda *given: spoil(exact(*given)), operands)


def last_of_three_by_a_bit(A, B, D, scalars):
    C = exact(A, B, D, scalars)
    C[2:] *= 1 + torch.finfo(C.dtype).eps
    return C


def not_mirrored(A, B, D, scalars):
    return (exact(A, B, D, scalars) if D is not None else A.float() @ B.float()).to(A.dtype)


def squared(A, B, D, scalars):
    return exact(A, A.mT, D, scalars)


def wrong_beside_the_diagonal(A, B, D, scalars):
    C = exact(A, B, D, scalars)
    if D is None and A.data_ptr() != B.data_ptr():
        C[:, 201, 205] = C[:, 205, 201] = 2 * C[:, 201, 205]
    return C


WRONG_PRODUCTS = {
    last_of_three_by_a_bit: "other bits alone",
    not_mirrored: "not symmetric",
    squared: "times what rounding can explain",
    wrong_beside_the_diagonal: "times what rounding can explain",
}


@pytest.mark.parametrize("spoiled, words", WRONG_PRODUCTS.items())
def test_wrong_last_matrices_and_wrong_products_of_two_that_commute_fail_the_proof(kernel, spoiled, words):
    """Around the diagonal of A B a sum of neighbours would mix both halves: there elements are compared."""
    proof = kernel.tuning.proof
    operands = proof.operands_of(torch.empty(0, dtype=torch.float32), (300, 320))
    proof.prove_products(exact, operands)
    for prove in (proof.prove_products, proof.prove_launch):
        with pytest.raises(proof.WrongResultError, match=words):
            prove(spoiled, operands)


def of_11_bits(x):
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((2**11 * mantissa).round() / 2**11, exponent)


def test_float32_products_of_factors_that_were_rounded_to_tf32_fail_the_proof(kernel):
    proof = kernel.tuning.proof
    operands = proof.operands_of(torch.empty(0, dtype=torch.float32), (256, 512))
    with pytest.raises(proof.WrongResultError, match="times what rounding can explain"):
        proof.prove_products(lambda A, B, *rest: exact(of_11_bits(A), of_11_bits(B), *rest), operands)


def test_a_product_that_is_wrong_for_views_of_tall_matrices_fails_the_proof(kernel):
    proof = kernel.tuning.proof
    operands = proof.operands_of(torch.empty(0, dtype=torch.float32), (48, 80))

    def spoiled(A, B, D, scalars):
        C = exact(A, B, D, scalars)
        return 1.01 * C if A.stride(1) == 1 else C

    proof.prove_products(spoiled, operands)
    with pytest.raises(proof.WrongResultError, match="times what rounding can explain"):
        proof.prove_launch(spoiled, operands)


def test_a_nan_of_an_addend_that_spreads_fails_the_proof(kernel):
    """Where a product is stored with its mirror image, one of two addends may be read for both."""
    proof = kernel.tuning.proof
    operands = proof.operands_of(torch.empty(0, dtype=torch.float32), (48, 80))
    proof.prove_launch(exact, operands)

    def spread(A, B, D, scalars):
        C = exact(A, B, D, scalars)
        return C if D is None else row_of_a_nan(C)

    proof.prove_products(spread, operands)
    with pytest.raises(proof.WrongResultError, match="a NaN of D did not stay"):
        proof.prove_launch(spread, operands)


@pytest.mark.parametrize("alpha", [2.0315, -2.0315])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_product_in_float32_errs_by_more_than_is_allowed(kernel, k, alpha):
    """Of few terms, where alpha, the addend and the result round about as often as the sum. No more is allowed."""
    generator = torch.Generator().manual_seed(k)
    A, B, D = (torch.randn(shape, generator=generator) for shape in ((512, k), (k, 512), (512, 512)))
    beta, sums = -4.775, torch.zeros(512, 512)
    for i in range(k):
        sums = sums + A[:, i : i + 1] * B[i : i + 1]
    found = torch.tensor(alpha) * sums + torch.tensor(beta) * D
    exact, allowed = kernel.tuning.roundings.product(A, B, float(torch.tensor(alpha)), (float(torch.tensor(beta)), D))
    assert ((found.double() - exact).abs() <= allowed).all()
    sizes = abs(alpha) * (A.double().abs() @ B.double().abs()) + abs(beta) * D.double().abs()
    assert (allowed <= (k + 4.01) * 2.0**-24 * sizes).all()


def test_the_rounding_of_a_result_is_that_of_its_dtype(kernel):
    """Also where the sum cancels, whose roundings do not, and where numbers have fewer digits because they are tiny."""
    roundings, unit = kernel.tuning.roundings, kernel.kernels.formats.unit_roundoff
    A, B = torch.ones(1, 2).bfloat16(), torch.tensor([[1.0], [-1.0]]).bfloat16()
    _, summing = roundings.product(A, B, 1.0, dtype=torch.float64)
    for given, dtype in ((None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        _, allowed = roundings.product(A, B, 1.0, dtype=given)
        assert allowed.item() == pytest.approx(summing.item() * (1 + unit(dtype)), rel=1e-9)
    tiny = torch.tensor([0.0, 2.0**-20], dtype=torch.float64)
    assert roundings.rounding_error(tiny, torch.float16).tolist() == [2.0**-25] * 2
