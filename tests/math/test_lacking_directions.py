"""What directions that a gradient lacks become: zero rows and columns stay zero, and low rank costs few digits."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.exact_polynomial import exact_factor

SHAPE = 128, 384
METHODS = [
    (torch.float32, "standard"),
    (torch.float32, "gram"),
    (torch.bfloat16, "standard"),
    (torch.bfloat16, "gram_float32"),
    (torch.float16, "gram"),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LOW_RANKS = {
    "equal entries": torch.ones(SHAPE),
    "rank one": normal(SHAPE[0], 1) @ normal(1, SHAPE[1]),
    "rank eight": normal(SHAPE[0], 8) @ normal(8, SHAPE[1]),
    "positive, rank 64": normal(SHAPE[0], 64).relu() @ normal(64, SHAPE[1]).relu(),
    "rows twice": normal(SHAPE[0] // 2, SHAPE[1]).repeat(2, 1),
}


@pytest.mark.parametrize("dtype, method", METHODS, ids=str)
def test_zero_rows_and_columns_stay_zero(kernel, dtype, method):
    """All squares have zeros there but for the diagonal, which multiplies zeros."""
    G = normal(3, *SHAPE)
    G[1, 40:60] = G[1, :, 7] = 0
    G[2] = 0
    result = kernel.orthogonalize(G, dtype=dtype, method=method, ns_steps=5)
    assert torch.equal(result == 0, G == 0)


@pytest.mark.parametrize("case", LOW_RANKS)
def test_low_rank_costs_the_gram_iteration_in_bfloat16_one_rounding_more(kernel, case):
    """Of the product Q of all steps but the first: where X has nothing, Q is as large as their first coefficients are.

    The first step would add its coefficient as a factor, 8.2, if it were in the same window.
    """
    G, schedule = LOW_RANKS[case], kernel.schedules.resolve_schedule("polar_express", 5)
    exact = exact_factor(G, schedule).double()
    errors = {
        method: ((kernel.orthogonalize(G, dtype=torch.bfloat16, method=method).double() - exact).norm() / exact.norm())
        for method in ("standard", "gram_float32")
    }
    rounding = math.prod(a for a, _, _ in schedule[1:]) * torch.finfo(torch.bfloat16).eps / 2
    assert errors["gram_float32"] <= errors["standard"] + rounding
