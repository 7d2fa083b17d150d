"""The proof of what a step does with products: wrong ones fail."""

from __future__ import annotations

import pytest
import torch


def test_products_in_place_are_proven_and_wrong_ones_fail(kernel):
    """The proof keeps its operands, whatever a product overwrites."""
    native, like = kernel.kernels.products.NATIVE, torch.empty(0, dtype=torch.bfloat16)
    prove_apply, WrongResultError = kernel.tuning.step_proof.prove_apply, kernel.tuning.proof.WrongResultError
    prove_apply(native.affine, like, (48, 80))
    with pytest.raises(WrongResultError):
        prove_apply(lambda B, X, a: native.affine(B, X, a + 1), like, (48, 80))


def rounded(B, X, a):
    """A product that is right: in float32, and rounded once."""
    return (B.float() @ X.float() + a * X.float()).to(X.dtype)


WRONG_APPLIED = {
    "by little, in every entry": lambda result, a: 1.02 * result,
    "where nothing is added": lambda result, a: result if a else 2 * result,
    "in the last row": lambda result, a: result.index_fill(1, torch.tensor([47]), 0.0),
}


@pytest.mark.parametrize("spoil", WRONG_APPLIED.values(), ids=list(WRONG_APPLIED))
def test_what_is_applied_wrongly_fails_the_proof(kernel, spoil):
    """The Gram iteration multiplies X by a window's product and adds nothing, for which other code may run."""
    proof, like = kernel.tuning.step_proof, torch.empty(0, dtype=torch.bfloat16)
    proof.prove_apply(rounded, like, (48, 80))
    with pytest.raises(proof.WrongResultError, match="times what rounding can explain"):
        proof.prove_apply(lambda B, X, a: spoil(rounded(B, X, a), a), like, (48, 80))


def test_what_is_applied_otherwise_in_a_batch_fails_the_proof(kernel):
    """By less than rounding may change."""
    proof, like = kernel.tuning.step_proof, torch.empty(0, dtype=torch.float32)

    def by_batch(B, X, a):
        return rounded(B, X, a) * (1 + (len(X) > 1) * torch.finfo(X.dtype).eps)

    with pytest.raises(proof.WrongResultError, match="other bits alone"):
        proof.prove_apply(by_batch, like, (48, 80))


def test_a_nan_that_spreads_over_a_batch_fails_the_proof_of_what_is_applied(kernel):
    proof, like = kernel.tuning.step_proof, torch.empty(0, dtype=torch.float32)

    def spread(B, X, a):
        result = (B.double() @ X.double() + a * X.double()).to(X.dtype)
        return torch.full_like(result, torch.nan) if result.isnan().any() else result

    with pytest.raises(proof.WrongResultError, match="a NaN changed another matrix"):
        proof.prove_apply(spread, like, (48, 80))


def test_an_iteration_in_one_call_is_proven_by_its_products_and_a_wrong_one_fails(kernel):
    """Any of its matrices may be the wrong one."""
    proof, shape = kernel.tuning.step_proof, (5, 48, 80)
    like, by_steps = torch.empty(0, dtype=torch.bfloat16), lambda X: 2 * X

    def spoiled(X):
        assert X.shape == shape
        return torch.cat([2 * X[:-1], 3 * X[-1:]])

    proof.prove_iteration(lambda X: X + X, by_steps, like, shape)
    proof.prove_iteration(lambda X: X.add_(X), lambda X: X.mul_(2), like, shape)  # both may overwrite their argument
    with pytest.raises(proof.WrongResultError, match="step by step"):
        proof.prove_iteration(spoiled, by_steps, like, shape)


@pytest.mark.parametrize("count", [2, 3])
def test_a_nan_that_spreads_in_one_call_fails_the_proof_of_an_iteration(kernel, count):
    """A thread may use the same memory for one matrix after the other."""
    proof, like = kernel.tuning.step_proof, torch.empty(0, dtype=torch.bfloat16)

    def spread(X):
        return torch.full_like(X, torch.nan) if X.isnan().any() else 2 * X

    with pytest.raises(proof.WrongResultError, match="a NaN changed another matrix"):
        proof.prove_iteration(spread, lambda X: 2 * X, like, (count, 48, 80))
