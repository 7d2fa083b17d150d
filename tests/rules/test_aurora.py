"""Aurora: momentum whose lines are scaled until those of its polar factor are alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.support.inside import plan_of

AURORA = "experimental_aurora"
SHAPES = [(40, 12), (12, 40), (16, 16)]

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.kernels_ci]


@pytest.fixture(scope="module")
def rule(kernel):
    return kernel.rules.equalization


def uneven(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return matrices whose lines of the long side differ by a factor of a hundred."""
    X = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float64)
    rows, cols = shape[-2:]
    lines = torch.logspace(-1, 1, max(rows, cols), device="cpu")
    X *= lines[:, None] if rows > cols else lines
    return X.to(torch.get_default_device(), dtype)


def update(kernel, G: Tensor, **settings) -> Tensor:
    """Return what a step with lr 1 and no decay takes from a matrix of zeros."""
    p = nn.Parameter(torch.zeros_like(G))
    plain = {"adjust_lr_fn": lambda rows, cols: 1.0, "eps": 0.0, "momentum": 0.0, "lr": 1.0}
    optimizer = kernel.Muon([("w", p)], **plain, **settings)
    p.grad = G
    optimizer.step()
    return -p.detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_that_of_the_paper(kernel, shape):
    """Tall: U = polar(D G) with D from the rows of G, then D by those of U, and U again; wide ones transposed."""
    G = uneven(shape)
    if shape[0] == shape[1]:
        expected = kernel.orthogonalize(G, eps=0.0)
    else:
        tall = G if shape[0] > shape[1] else G.mT
        D = 1 / torch.linalg.vector_norm(tall, dim=1, keepdim=True)
        U = kernel.orthogonalize(D * tall, eps=0.0)
        D = D * (tall.size(1) / tall.size(0) / U.square().sum(1, keepdim=True)) ** 0.5
        U = kernel.orthogonalize(D * tall, eps=0.0)
        expected = U if shape[0] > shape[1] else U.mT
    torch.testing.assert_close(update(kernel, G, equalize=AURORA), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_lines_of_the_long_side_become_alike_and_singular_values_stay_in_the_band(kernel, shape):
    G = uneven(shape)
    dim = 1 if shape[0] > shape[1] else 0

    def spread(U: Tensor) -> float:
        lines = torch.linalg.vector_norm(U, dim=dim)
        return (lines.max() / lines.min()).item()

    plain, rows_first, even = (
        update(kernel, G, equalize=by) for by in ("none", "rows" if dim == 1 else "columns", AURORA)
    )
    assert spread(even) < spread(rows_first) < spread(plain)
    # That of five steps of `polar_express` (schedules.PRESETS), which no singular value of these matrices is below.
    sigma = torch.linalg.svdvals(even)
    assert 0.863 <= sigma.min() and sigma.max() <= 1.131


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_line_is_scaled_to_what_it_lacks(rule, dtype):
    G, factors = uneven((2, 9, 4), dtype), uneven((2, 9, 4), dtype)
    lines = torch.linalg.vector_norm(factors.double(), dim=-1, keepdim=True)
    exact = G.double() * math.sqrt(4 / 9) / lines
    # The factor of a line and the product with it are rounded to float32, then, once, to the dtype of G.
    relative = torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2
    result = rule.rescaled_by_factors(G, factors)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=relative, atol=0.0)
    assert torch.equal(rule.rescaled_by_factors(G.mT, factors.mT), result.mT)


def test_zeros_stay_zeros_and_a_nan_in_its_matrix(rule):
    G = uneven((3, 6, 5), torch.float32)
    G[0, 2], G[1, 3, 1] = 0, math.nan
    result = rule.rescaled_by_factors(G, G)
    assert not result[0, 2].any() and result[0].isfinite().all() and result[1, 3].isnan().all()
    assert torch.equal(result[2:], rule.rescaled_by_factors(G[2:], G[2:]))


@pytest.mark.parametrize("line", [0.0, 1e-40], ids=str)
def test_a_line_that_its_factor_has_lost_is_not_blown_up(rule, line):
    """Rounding may leave nothing of a line in the factor, or less than float32's smallest normal number."""
    G = uneven((1, 6, 5), torch.float32)
    factors = G.clone()
    G[0, 2], factors[0, 2] = line or 1e-12, line
    result = rule.rescaled_by_factors(G, factors)
    assert result.isfinite().all() and result[0, 2].max() < 1
    assert line or torch.equal(result[0, 2], G[0, 2])


def test_it_is_explained_and_counted_as_two_passes(kernel):
    params = [("tall", nn.Parameter(torch.ones(40, 12))), ("square", nn.Parameter(torch.ones(16, 16)))]
    optimizer = kernel.Muon(params, equalize=AURORA)
    assert all(
        row.kernel.endswith(", lines of the long side made even (Aurora, experimental)")
        for row in optimizer.explain().rows
    )
    plain = kernel.Muon(params)
    costs = [[matrix.cost for (matrix,) in plan_of(each).matrices] for each in (plain, optimizer)]
    steps = [kernel.plan.costs.owners_cost(40, 12, count) for count in (5, 10)]
    assert [costs[0][0], costs[1][0]] == steps and costs[0][1] == costs[1][1]
    work = [[row.flops for row in each.explain().rows] for each in (plain, optimizer)]
    assert work[1] == [2 * work[0][0], work[0][1]]
