"""Rows and columns of one norm before the iteration (MuonEq) and after it (Muon+)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracles import rounding_error, unit_roundoff

SHAPES = [(3, 8, 20), (2, 40, 7), (1, 130, 350), (1, 1, 9)]
DTYPES = torch.float32, torch.bfloat16, torch.float16
SIDES = ("rows", "columns")
# The factor of a line and the product with it are rounded to float32.
ROUNDINGS = 2 * unit_roundoff(torch.float32)

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.kernels_ci]


@pytest.fixture(scope="module")
def rule(kernel):
    return kernel.rules.equalization


def uneven(shape, dtype=torch.float32, seed: int = 0) -> Tensor:
    """Return matrices whose rows and columns differ by a factor of a hundred."""
    generator = torch.Generator("cpu").manual_seed(seed)
    X = torch.randn(shape, generator=generator, device="cpu")
    X *= torch.logspace(-1, 1, shape[-1], device="cpu") * torch.logspace(1, -1, shape[-2], device="cpu")[:, None]
    return X.to(torch.get_default_device(), dtype)


def norms(X: Tensor, side: str) -> Tensor:
    return torch.linalg.vector_norm(X.double(), dim=-1 if side == "rows" else -2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("side", SIDES)
def test_equalized_lines_have_norm_one_and_their_direction(rule, shape, side, dtype):
    X = uneven(shape, dtype)
    result = rule.equalize(X, side, 1e-7)
    exact = X.double() / norms(X, side).unsqueeze(-1 if side == "rows" else -2)
    allowed = ROUNDINGS * exact.abs()
    assert ((result.double() - exact).abs() <= allowed + rounding_error(exact.abs() + allowed, dtype)).all()


@pytest.mark.parametrize("by", ["none", "rows_columns", "columns_rows"])
def test_the_second_side_comes_after_the_first(rule, by):
    X = uneven((2, 8, 20))
    expected = X
    for side in by.replace("none", "").split("_"):
        expected = rule.equalize(expected, side, 1e-7) if side else expected
    assert torch.equal(rule.equalize(X, by, 1e-7), expected)


def test_lines_below_eps_are_not_blown_up_and_zeros_stay_zeros(rule):
    X = torch.zeros(1, 3, 4)
    X[0, 1, 2], X[0, 2, 0] = 1e-9, 2.0
    result = rule.equalize(X, "rows", 1e-6)
    assert result[0].tolist() == [[0, 0, 0, 0], [0, 0, pytest.approx(1e-3), 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", ["frobenius", *SIDES])
def test_renormalized_factors_have_the_norm_of_exact_ones(rule, shape, dtype, by):
    factors = uneven(shape, dtype)
    rule.renormalize_(factors, by)
    rows, cols = shape[1:]
    # Roundings of the elements move a norm in proportion by at most as much; those below the normal numbers err by half
    # of the smallest one each.
    limits = torch.finfo(dtype)
    bounds = {"rtol": ROUNDINGS + limits.eps / 2, "atol": math.sqrt(rows * cols) * limits.smallest_normal * limits.eps}
    whole = torch.linalg.matrix_norm(factors.double())
    torch.testing.assert_close(whole, torch.full_like(whole, math.sqrt(min(rows, cols))), **bounds)
    if by != "frobenius":
        lines = norms(factors, by)
        expected = math.sqrt(min(rows, cols) / lines.size(-1))
        torch.testing.assert_close(lines, torch.full_like(lines, expected), **bounds)


@pytest.mark.parametrize("by", ["frobenius", *SIDES])
def test_small_factors_get_the_same_norm_to_the_bit(rule, by):
    """Those of gradients below `eps` are as small as the gradients; a power of two changes no rounding."""
    factors = uneven((2, 8, 20))
    small = factors * 2.0**-60
    rule.renormalize_(factors, by)
    rule.renormalize_(small, by)
    assert torch.equal(small, factors)


@pytest.mark.parametrize("by", ["frobenius", *SIDES])
def test_zeros_stay_zeros_and_a_nan_in_its_matrix(rule, by):
    factors = uneven((3, 6, 5))
    factors[0], factors[1, 2, 3] = 0, math.nan
    alone = factors[2:].clone()
    rule.renormalize_(factors, by)
    rule.renormalize_(alone, by)
    assert not factors[0].any() and factors[1, 2, 3].isnan() and torch.equal(factors[2:], alone)


@pytest.mark.parametrize("act", ["equalize", "frobenius"])
@pytest.mark.parametrize("side", SIDES)
def test_neither_batch_threads_nor_strides_change_a_bit(rule, side, act):
    def result(X: Tensor) -> Tensor:
        if act == "equalize":
            return rule.equalize(X, side, 1e-7)
        X = X.clone()
        rule.renormalize_(X, side)
        return X

    X = uneven((5, 64, 300), torch.bfloat16)
    expected = result(X)
    for threads in 1, 2, 3:
        torch.set_num_threads(threads)
        assert torch.equal(torch.cat([result(x) for x in X.split(1)]), expected)
        assert torch.equal(result(X.mT.contiguous().mT), expected)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)], ids=str)
def test_a_step_is_that_of_nanochat(kernel, shape):
    """Rows to one norm, the iteration, the norm of the whole: nanochat's update (2026), which is written down here."""
    G = uneven((1, *shape)).double()[0]
    X = G / torch.linalg.vector_norm(G, dim=-1, keepdim=True)
    factor = kernel.orthogonalize(X, eps=0.0)
    expected = factor * (math.sqrt(min(shape)) / torch.linalg.matrix_norm(factor))
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    settings = {"lr": 1.0, "adjust_lr_fn": lambda rows, cols: 1.0, "eps": 0.0, "momentum": 0.0}
    optimizer = kernel.Muon([("w", p)], equalize="rows", renormalize="frobenius", **settings)
    p.grad = G
    optimizer.step()
    torch.testing.assert_close(-p.detach(), expected, rtol=1e-12, atol=1e-12)


def test_what_is_done_is_explained_and_must_be_known(kernel):
    params = [("w", nn.Parameter(torch.ones(8, 20)))]
    rows = kernel.Muon(params, equalize="rows_columns", renormalize="columns_rows").explain().rows
    assert rows[0].kernel.endswith(", rows and columns equalized, renormalized by columns and rows")
    assert "equalized" not in (plain := kernel.Muon(params).explain().rows[0].kernel) and "renormalized" not in plain
    for wrong in {"equalize": "frobenius"}, {"renormalize": "row"}:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of none, "):
            kernel.Muon(params, **wrong)


def test_groups_that_differ_share_no_batch(kernel):
    """Two matrices of one shape, of which one is equalized: each gets what it gets alone."""
    G = uneven((1, 8, 20))[0]

    def updated(*settings: dict) -> list[Tensor]:
        groups = [{"params": [(f"w{i}", nn.Parameter(torch.zeros(8, 20)))], **s} for i, s in enumerate(settings)]
        optimizer = kernel.Muon(groups, weight_decay=0.0)
        for group in optimizer.param_groups:
            group["params"][0].grad = G.clone()
        optimizer.step()
        return [group["params"][0].detach() for group in optimizer.param_groups]

    plain, equal = {"renormalize": "rows"}, {"equalize": "columns"}
    together = updated(plain, equal)
    assert not torch.equal(*together)
    assert torch.equal(together[0], updated(plain)[0]) and torch.equal(together[1], updated(equal)[0])
