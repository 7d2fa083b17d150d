"""The tables of products: each computes the polynomials that its fields name."""

from __future__ import annotations

import pytest
import torch

from tests.support.proofs import roundings
from tests.support.symmetric_products import ALPHA, BETA, DIAGONAL, normal, symmetric

TABLES = {
    "SINGLE": torch.float32,
    "TRIANGLE": torch.float32,
    "NATIVE": torch.bfloat16,
    "BATCHED": torch.float32,
    "SYMMETRIC": torch.float32,
}


@pytest.fixture(params=TABLES)
def case(request, kernel):
    """A table and a dtype that it multiplies on a CPU."""
    if request.param == "SYMMETRIC":
        pytest.importorskip("triton")
    return getattr(kernel.kernels.products, request.param), TABLES[request.param]


def assert_within(result, exact, allowed):
    assert ((result.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("a", [0.0, DIAGONAL])
def test_a_square_has_its_affine_part_and_its_diagonal(case, a):
    """The number on the diagonal may be rounded, and added to the rounded rest, which rounds a second time."""
    table, dtype = case
    A = symmetric(2, 48, dtype)[slice(None) if table.batched else 0]
    exact, allowed = roundings.product(A, A, ALPHA, (BETA, A))
    diagonal = a * torch.eye(48, dtype=torch.float64)
    exact, allowed = exact + diagonal, allowed + roundings.rounding_error(diagonal, dtype)
    allowed = allowed + roundings.rounding_error(exact.abs() + allowed, dtype)
    assert_within(table.gram_affine(A.clone(), BETA, ALPHA, a), exact, allowed)


@pytest.mark.parametrize("a", [0.0, DIAGONAL])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_product_with_a_long_matrix_has_its_addend(case, a, elsewhere):
    table, dtype = case
    B, X = (x[slice(None) if table.batched else 0] for x in (symmetric(2, 48, dtype), normal(2, 48, 80, dtype=dtype)))
    out = torch.full_like(X, torch.nan) if elsewhere else None
    result = table.affine(B, X.clone(), a, out)
    assert out is None or result.data_ptr() == out.data_ptr()
    assert_within(result, *roundings.product(B, X, 1.0, (a, X)))


def test_a_diagonal_is_added_in_place(kernel):
    A, before = symmetric(2, 5), symmetric(2, 5)
    assert kernel.kernels.products.add_to_diagonal_(A, 0.5) is A
    assert torch.equal(A, before + 0.5 * torch.eye(5))
