"""The proof of products: the matrices that it multiplies, what it compares, and how far rounding may move a result."""

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
        matrices = proof.adversarial(like, 700, 700), kernel.tuning.small_proof.adversarial(64, 80)
        assert kernel.tuning.contest.drawn(torch.device("cpu"), 2, 3).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, matrices, expected))
    assert (expected[0].double().norm(dim=(1, 2)) > 60).all()


@pytest.mark.parametrize("m, k", [(65, 80), (300, 700)])
def test_matrices_of_a_proof_are_those_that_have_broken_kernels(kernel, m, k):
    """Normal entries, rank one, and one dominant row, in the middle; and Gram matrices of such.

    Norms are sums of m k squares in float32, and traces are their squares.
    """
    proof, like = kernel.tuning.proof, torch.empty(0, dtype=torch.float64)
    X, S = proof.operands_of(like, (m, k))
    assert torch.linalg.matrix_norm(X).tolist() == pytest.approx([proof.SCALE] * 3, rel=m * k * 2.0**-24)
    assert torch.linalg.matrix_rank(X[:2], rtol=1e-4).tolist() == [m, 1]
    deviation = proof.SCALE / (m * k) ** 0.5
    assert abs(X[0].mean()) < 5 * deviation / (m * k) ** 0.5 and X[0].abs().max() < 10 * deviation
    rows = torch.linalg.vector_norm(X, dim=2)
    assert [bool(row > 50 * others.median()) for row, others in zip(rows[:, m // 2], rows)] == [False, False, True]
    traces = S.diagonal(dim1=1, dim2=2).sum(1).tolist()
    assert torch.equal(S, S.mT) and traces == pytest.approx([proof.SCALE**2] * 3, rel=m * k * 2.0**-24)
    assert (torch.linalg.eigvalsh(S)[:, 0] > -1e-3).all()


@pytest.mark.parametrize("alpha", [0.5, -0.5])
@pytest.mark.parametrize("k", [100, 1100])
def test_sums_of_products_are_those_of_their_elements(kernel, k, alpha):
    """In groups of neighbours, of which the last one is shorter, and over more columns than are copied at a time.

    Each of k products, alpha twice, and the addend may move a sum by a rounding of all magnitudes.
    """
    roundings, proof = kernel.tuning.roundings, kernel.tuning.proof
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randint(-8, 9, shape, generator=generator).bfloat16() for shape in ((33, k), (k, 130)))
    signs = proof._signs_of_neighbours(130)
    assert set(signs.flatten()[:130].tolist()) == {-1.0, 1.0} and not signs.flatten()[130:].any()
    products, (_, magnitudes) = A.double() @ B.double(), roundings.sums_of_neighbours(B, signs)
    grouped = [(products * signs.flatten()[:130])[:, i : i + 64].sum(1) for i in (0, 64, 128)]
    exact, allowed = roundings.sums_of_product(A, B, alpha, [(2.0, A[:, :1].expand(33, 130))], signs)
    addend = 2.0 * A[:, :1].double() * signs.sum(1)
    assert torch.equal(exact, alpha * torch.stack(grouped, 1) + addend)  # integers: float64 rounds nothing
    assert torch.equal(magnitudes.sum(1), B.double().abs().sum(1))
    sizes = abs(alpha) * A.double().abs() @ magnitudes + 2.0 * A[:, :1].double().abs() * signs.abs().sum(1)
    share = (k + 3) * 2.0**-24
    assert torch.allclose(allowed, share / (1 - share) * sizes, rtol=1e-12, atol=0)
    entry, _ = roundings.product(A, B, 1.0)
    assert torch.equal(entry, products)


@pytest.mark.parametrize("m", [1, 64, 65, 300, 4096])
def test_small_results_are_compared_as_a_whole_and_of_large_ones_the_last_rows_and_some_others(kernel, m):
    """The last rows are those of a tile that is cut; the middle one is the dominant row."""
    rows = kernel.tuning.proof.checked_rows(m).tolist()
    assert rows == sorted({*rows}) and min(m, 64) - 1 <= len(rows) <= 64  # the middle one may be among the others
    assert {0, m // 2, *range(max(0, m - 32), m)} <= {*rows}


@pytest.mark.parametrize("alpha", [2.0315, -2.0315])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_product_in_float32_errs_by_more_than_is_allowed(kernel, k, alpha):
    """Of few terms, where alpha, the addend and the result round about as often as the sum. No more is allowed."""
    generator = torch.Generator().manual_seed(k)
    A, B, D = (torch.randn(shape, generator=generator) for shape in ((512, k), (k, 512), (512, 512)))
    beta, sums = -4.775, torch.zeros(512, 512)
    for i in range(k):
        sums = sums + A[:, i : i + 1] * B[i : i + 1]
    product = torch.tensor(alpha) * sums + torch.tensor(beta) * D
    exact, allowed = kernel.tuning.roundings.product(A, B, float(torch.tensor(alpha)), (float(torch.tensor(beta)), D))
    assert ((product.double() - exact).abs() <= allowed).all()
    sizes = abs(alpha) * (A.double().abs() @ B.double().abs()) + abs(beta) * D.double().abs()
    assert (allowed <= (k + 4.01) * 2.0**-24 * sizes).all()


def test_the_rounding_of_a_result_is_that_of_its_dtype(kernel):
    """Also where the sum cancels, whose roundings do not, and where numbers have fewer digits because they are tiny."""
    roundings, unit = kernel.tuning.roundings, kernel.kernels.formats.unit_roundoff
    A, B = torch.ones(1, 2).bfloat16(), torch.tensor([[1.0], [-1.0]]).bfloat16()
    _, summing = roundings.product(A, B, 1.0, dtype=torch.float64)
    for option, dtype in ((None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        _, allowed = roundings.product(A, B, 1.0, dtype=option)
        assert allowed.item() == pytest.approx(summing.item() * (1 + unit(dtype)), rel=1e-9)
    tiny = torch.tensor([0.0, 2.0**-20], dtype=torch.float64)
    assert roundings.rounding_error(tiny, torch.float16).tolist() == [2.0**-25] * 2
