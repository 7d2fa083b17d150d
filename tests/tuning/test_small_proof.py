"""The proof of a whole iteration in one launch: wrong ones fail, for whatever they are wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch


def in_columns(G: torch.Tensor) -> bool:
    return G.size(1) > 1 and G.stride(1) == 1


WRONG_LAUNCHES = {
    "everywhere": lambda G, steps: True,
    "for tall matrices, which are passed as views": lambda G, steps: in_columns(G),
    "in as many steps as are taken": lambda G, steps: len(steps) == 4 * 5,
    "in long windows": lambda G, steps: 0.0 in steps[3::4],
    "in windows of one step": lambda G, steps: 0.0 not in steps[3::4],
    "in the size that is used": lambda G, steps: G.shape[1:] == (17, 24),
    "in one that no panel divides": lambda G, steps: G.size(1) > 17 and G.size(2) % 16,
}


def iterated(spoil, G, C, steps, numbers):
    """Do what a launch does, step by step in float64; `spoil` changes the results."""
    for g, result in zip(G, C):
        X = numbers[0] * g.double() / torch.linalg.matrix_norm(g.double())
        for a, b, c in zip(steps[::4], steps[1::4], steps[2::4]):
            X = a * X + (b * X @ X.mT + c * X @ X.mT @ X @ X.mT) @ X
        result.copy_(X)
    spoil(G, C, steps)


@pytest.mark.parametrize("is_wrong", WRONG_LAUNCHES.values(), ids=list(WRONG_LAUNCHES))
def test_a_small_result_that_is_too_large_fails_the_proof(kernel, is_wrong):
    """Other code is compiled for each number of steps and each order of memory."""
    small, arguments = kernel.tuning.small_proof, (torch.empty(0, dtype=torch.float32), (17, 24), 32, (1, 4))
    small.prove_small(partial(iterated, lambda *_: None), *arguments)
    with pytest.raises(small.WrongResultError, match=r"error .* is allowed"):
        small.prove_small(partial(iterated, lambda G, C, steps: is_wrong(G, steps) and C.mul_(1.01)), *arguments)


@pytest.mark.parametrize(
    "work, packed", [("bfloat16", torch.bfloat16), ("bfloat16", torch.float32), ("float16", torch.float32)], ids=str
)
def test_a_small_result_that_is_wrong_for_directions_of_a_dtype_fails_the_proof(kernel, work, packed):
    """For each dtype other code is compiled. Steps in float16 pack float32, and so do those that keep norms."""
    small, arguments = kernel.tuning.small_proof, (torch.empty(0, dtype=getattr(torch, work)), (17, 24), 32, (1, 4))
    with pytest.raises(small.WrongResultError, match=r"error .* is allowed"):
        small.prove_small(partial(iterated, lambda G, C, _: G.dtype == packed and C.mul_(1.5)), *arguments)


# What a launch may do to matrices beside each other, and the words of the proof.
SPOILED_BATCHES = {
    "alone": (lambda G, C: len(G) == 1 and C.mul_(1 + 2.0**-22), "other bits alone"),
    "beside a NaN": (lambda G, C: G.isnan().any() and C[-1].mul_(1 + 2.0**-22), "changed another matrix"),
    "a NaN that is lost": (lambda G, C: C[:, 1:].nan_to_num_(), "did not spread"),
}


@pytest.mark.parametrize("spoil, words", SPOILED_BATCHES.values(), ids=list(SPOILED_BATCHES))
def test_small_matrices_that_know_their_batch_or_lose_a_nan_fail_the_proof(kernel, spoil, words):
    """By less than rounding may change."""
    small, arguments = kernel.tuning.small_proof, (torch.empty(0, dtype=torch.float32), (17, 24), 32, (1, 4))
    with pytest.raises(small.WrongResultError, match=words):
        small.prove_small(partial(iterated, lambda G, C, steps: spoil(G, C)), *arguments)
