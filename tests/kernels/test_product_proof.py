"""The proof of a symmetric product finds what may be wrong with a launch."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.symmetric_products import WrongResultError, prove_product, scaled_product

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def module(kernel):
    return kernel.kernels.gpu.symmetric_gemm


# What may go wrong in a launch.
FAULTS = {
    "wrong": lambda C: C * 1.02,
    "asymmetric": lambda C: C + torch.ones_like(C).triu(1) * 1e-3,
    "not written": lambda C: C.index_fill(1, torch.tensor([0]), torch.nan),
    "NaN is lost": lambda C: C.nan_to_num(),
    "NaN spreads": lambda C: C + 0 * C.sum((1, 2), keepdim=True),
    "knows its batch": lambda C: C * (1 + len(C) * torch.finfo(C.dtype).eps),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_proof_finds_what_is_wrong(module, fault):
    spoil = FAULTS.get(fault, lambda C: C)

    def launch(A, B, D, C, scalars) -> None:
        C.copy_(spoil(scaled_product(module, A, B, D, scalars)))

    with pytest.raises(WrongResultError) if fault else contextlib.nullcontext():
        prove_product(launch, torch.float16, [(48, 32)])


def test_a_proof_finds_sums_that_are_rounded_too_early():
    """The Gram matrix of one dominant row has a square that float16 holds only after its small coefficient."""

    def launch(A, B, D, C, scalars) -> None:
        alpha, beta, diagonal = scalars
        product = alpha * (A.double() @ B.double()).half().double() + diagonal * torch.eye(len(C[0]))
        C.copy_(product if D is None else product + beta * D.double())

    with pytest.raises(WrongResultError, match="an error is"):
        prove_product(launch, torch.float16, [(48, 32)])


# What may go wrong on the diagonal alone, as it was rounded already or not.
DIAGONAL_FAULTS = {
    "forgotten": lambda C, a: C,
    "rounded before it is added": lambda C, a: C + a * torch.eye(len(C[0]), dtype=C.dtype),
    "only in the first tile": lambda C, a: C + a * torch.diag_embed((torch.arange(len(C[0])) < 32).to(C.dtype)),
    "in tiles beside the diagonal": lambda C, a: C + a * torch.eye(len(C[0]) // 3, dtype=C.dtype).repeat(3, 3),
}


@pytest.mark.parametrize("fault", DIAGONAL_FAULTS)
def test_a_proof_finds_a_wrong_diagonal(module, fault):
    def launch(A, B, D, C, scalars) -> None:
        alpha, beta, diagonal = scalars
        C.copy_(DIAGONAL_FAULTS[fault](scaled_product(module, A, B, D, (alpha, beta, 0.0)), diagonal))

    with pytest.raises(WrongResultError, match="an error is"):
        prove_product(launch, torch.float16, [(48, 32)])


def test_a_proof_finds_a_nan_of_the_addend_elsewhere(module):
    def launch(A, B, D, C, scalars) -> None:
        C.copy_(scaled_product(module, A, B, D, scalars))
        if D is not None and D is not A:
            C += 0 * D.sum((1, 2), keepdim=True)

    with pytest.raises(WrongResultError, match="a NaN of D"):
        prove_product(launch, torch.float16, [(48, 32)])
