"""The proof of products: wrong ones fail, wherever they are wrong."""

from __future__ import annotations

import pytest
import torch


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


def nan_in_the_next(C):
    return torch.where(C.isnan().any(0), torch.nan, C)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (zero_beside_a_nan, "changed bits outside"),
        (nan_in_the_second, "times what rounding can explain"),
        (nan_in_the_next, "did not stay in its row and column"),
    ],
)
def test_what_is_wrong_beside_a_nan_or_is_none_fails_the_proof(kernel, spoil, words):
    proof = kernel.tuning.proof
    operands = proof.operands_of(torch.empty(0, dtype=torch.float32), (48, 80))
    proof.prove_products(exact, operands)
    with pytest.raises(proof.WrongResultError, match=words):
        proof.prove_products(lambda *arguments: spoil(exact(*arguments)), operands)


def last_of_three_by_a_bit(A, B, D, scalars):
    C = exact(A, B, D, scalars)
    C[2:] *= 1 + torch.finfo(C.dtype).eps
    return C


def not_mirrored(A, B, D, scalars):
    return (exact(A, B, D, scalars) if D is not None else A.float() @ B.float()).to(A.dtype)


def squared(A, B, D, scalars):
    return exact(A, A.mT, D, scalars)


def of_two_that_commute(A, B, D) -> bool:
    return D is None and A.data_ptr() != B.data_ptr()


def adds_something(A, B, D) -> bool:
    return D is not None


def doubled(row: int, column: int, where):
    """Return a product of which two mirrored elements are twice what they should be."""

    def product(A, B, D, scalars):
        C = exact(A, B, D, scalars)
        if where(A, B, D):
            C[:, row, column] = C[:, column, row] = 2 * C[:, row, column]
        return C

    return product


def neighbours_in_each_others_place(A, B, D, scalars):
    C = exact(A, B, D, scalars)
    C[:, 201, 20:22] = C[:, 201, 20:22].flip(1)
    C[:, 20:22, 201] = C[:, 201, 20:22]
    return C


def wrong_in_the_second(A, B, D, scalars):
    C = exact(A, B, D, scalars)
    C[1:2, 201, 20] = C[1:2, 20, 201] = 1.01 * C[1:2, 20, 201]
    return C


def wrong_by_little_in_the_second(A, B, D, scalars):
    C = exact(A, B, D, scalars)
    C[1:2, 299, 0] = C[1:2, 0, 299] = 1.0002 * C[1:2, 0, 299]
    return C


def other_by_a_bit_above_the_diagonal(A, B, D, scalars):
    C = exact(A, B, D, scalars)
    C[:, 20, 201] *= 1 + torch.finfo(C.dtype).eps
    return C


WRONG_PRODUCTS = {
    last_of_three_by_a_bit: "other bits alone",
    not_mirrored: "not symmetric",
    squared: "times what rounding can explain",
    doubled(201, 205, of_two_that_commute): "times what rounding can explain",
    doubled(262, 262, of_two_that_commute): "times what rounding can explain",
    doubled(201, 20, of_two_that_commute): "times what rounding can explain",
    doubled(201, 20, adds_something): "times what rounding can explain",
    neighbours_in_each_others_place: "times what rounding can explain",
    wrong_in_the_second: "times what rounding can explain",
    wrong_by_little_in_the_second: "times what rounding can explain",
    other_by_a_bit_above_the_diagonal: "not symmetric",
}


@pytest.mark.parametrize("spoiled, words", WRONG_PRODUCTS.items())
def test_products_that_are_wrong_for_some_operands_or_in_some_places_fail_the_proof(kernel, spoiled, words):
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


SPOILED_ADDENDS = {
    "spread": row_of_a_nan,
    "spread far from the diagonal": lambda C: row_of_a_nan(C) if C[:, :, 0].isnan().any() else C,
    "lost": torch.nan_to_num,
    "changes others": lambda C: C * (1 + torch.finfo(C.dtype).eps * C.isnan().any()),
}


@pytest.mark.parametrize("spoil", SPOILED_ADDENDS.values(), ids=list(SPOILED_ADDENDS))
def test_a_nan_of_an_addend_that_does_not_stay_fails_the_proof(kernel, spoil):
    """Where a product is stored with its mirror image, one of two addends may be read for both."""
    proof = kernel.tuning.proof
    operands = proof.operands_of(torch.empty(0, dtype=torch.float32), (48, 80))
    proof.prove_launch(exact, operands)

    def spoiled(A, B, D, scalars):
        C = exact(A, B, D, scalars)
        return C if D is None else spoil(C)

    proof.prove_products(spoiled, operands)
    with pytest.raises(proof.WrongResultError, match="a NaN of D did not stay"):
        proof.prove_launch(spoiled, operands)
