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
    "the one of rank one alone": (
        lambda G, C: len(G) == 1 and torch.linalg.matrix_rank(G[0]) == 1 and C.mul_(1 + 2.0**-22),
        "other bits alone",
    ),
    "the second beside a NaN": (
        lambda G, C: G.isnan().any() and C[1].mul_(1 + 2.0**-22),
        "changed another matrix",
    ),
    "beside a NaN": (lambda G, C: G.isnan().any() and C[-1].mul_(1 + 2.0**-22), "changed another matrix"),
    "a NaN that is lost": (lambda G, C: C[:, 1:].nan_to_num_(), "did not spread"),
}


@pytest.mark.parametrize("spoil, words", SPOILED_BATCHES.values(), ids=list(SPOILED_BATCHES))
def test_small_matrices_that_know_their_batch_or_lose_a_nan_fail_the_proof(kernel, spoil, words):
    """By less than rounding may change."""
    small, arguments = kernel.tuning.small_proof, (torch.empty(0, dtype=torch.float32), (17, 24), 32, (1, 4))
    with pytest.raises(small.WrongResultError, match=words):
        small.prove_small(partial(iterated, lambda G, C, steps: spoil(G, C)), *arguments)


@pytest.mark.parametrize("share, words", [(0.8, "other bits alone"), (1.2, "error .* is allowed")])
@pytest.mark.parametrize("number, luck", [(0, 1.0), (1, 1.0), (2, 4.0)], ids=["normal", "dominant row", "rank one"])
def test_a_small_result_may_err_by_what_roundings_add_up_to(kernel, share, words, number, luck):
    """Those of the matrix of rank one may all go one way. Errors of a batch alone are found in any case."""
    small, schedules, size = kernel.tuning.small_proof, kernel.schedules, (17, 24)
    windows = small.in_windows(schedules.resolve_schedule("polar_express", 5), (1, 4), small.SCALE)
    allowed = luck * small.largest_error(small.adversarial(*size)[number], windows, small.SCALE, torch.float32)

    def spoil(G, C, steps):
        if C.shape == (3, *size) and 0.0 in steps[3::4]:
            C[number, 0, 0] += share * allowed

    with pytest.raises(small.WrongResultError, match=words):
        small.prove_small(partial(iterated, spoil), torch.empty(0, dtype=torch.float32), size, 32, (1, 4))


def test_a_result_that_is_no_number_fails_the_proof(kernel):
    small = kernel.tuning.small_proof
    with pytest.raises(small.WrongResultError, match=r"error nan where 1.0e\+00 is allowed"):
        small.check_errors(torch.full((1, 2, 2), torch.nan), [(torch.zeros(2, 2, dtype=torch.float64), 1.0)])


def test_small_matrices_of_a_proof_are_those_that_have_broken_kernels(kernel):
    """Normal entries, one dominant row, and rank one to the bit, in few enough bits for bfloat16."""
    G = kernel.tuning.small_proof.adversarial(17, 24)
    assert torch.equal(G.bfloat16().float(), G) and torch.linalg.matrix_rank(G.double()).tolist() == [17, 17, 1]
    rows = torch.linalg.vector_norm(G, dim=2).sort(descending=True).values
    assert [bool(first > 50 * second) for first, second, *_ in rows[:2]] == [False, True]


def test_what_a_launch_leaves_unwritten_is_no_number(kernel):
    """Else it might still hold what another launch has written there."""
    small, seen = kernel.tuning.small_proof, []
    spoil = lambda G, C, *rest: seen.append(C.isnan().all()) or iterated(lambda *_: None, G, C, *rest)  # noqa: E731
    small.prove_small(spoil, torch.empty(0, dtype=torch.float32), (17, 24), 32, (1, 4))
    assert seen and all(seen)
