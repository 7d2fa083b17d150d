"""NorMuon's rule: lines divided by the root mean square that they have had, and the norm of the whole kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.support import oracles
from tests.support.oracles import rounding_error, unit_roundoff

SHAPES = [(3, 8, 20), (2, 40, 7), (1, 130, 350), (1, 1, 9), (2, 9, 1)]
DTYPES = torch.float32, torch.bfloat16, torch.float16
SIDES = ("rows", "columns")
BETA = 0.95

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.kernels_ci]


@pytest.fixture(scope="module")
def balance_(kernel):
    return kernel.rules.second_moment.balance_


def uneven(shape, dtype=torch.float32, seed: int = 0) -> Tensor:
    """Return matrices whose rows and columns differ by a factor of ten."""
    generator = torch.Generator("cpu").manual_seed(seed)
    X = torch.randn(shape, generator=generator, device="cpu")
    X *= (
        torch.logspace(-0.5, 0.5, shape[-1], device="cpu") * torch.logspace(0.5, -0.5, shape[-2], device="cpu")[:, None]
    )
    return X.to(torch.get_default_device(), dtype)


def moments_of(shape, side: str, seed: int = 1) -> Tensor:
    count, rows, cols = shape
    size = (count, rows, 1) if side == "rows" else (count, 1, cols)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(size, generator=generator, device="cpu").to(torch.get_default_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("side", SIDES)
def test_updates_and_moments_are_those_of_the_paper(balance_, shape, side, dtype):
    """Also where moments begin at zero.

    Moments are rounded once, to float32. Of a scale they bring half a rounding, and as much through the norm of the
    scaled lines; the two norms and the scale are rounded, and so is the product: five in all.
    """
    for moments in moments_of(shape, side), torch.zeros_like(moments_of(shape, side)):
        updates = uneven(shape, dtype)
        exact, exact_moments = oracles.balance(updates, moments, BETA, side)
        norms = balance_(updates, moments, BETA)
        assert ((moments - exact_moments).abs() <= (1 + 1e-6) * rounding_error(exact_moments, torch.float32)).all()
        allowed = 5 * unit_roundoff(torch.float32) * exact.abs()
        assert ((updates - exact).abs() <= allowed + rounding_error(exact.abs() + allowed, dtype)).all()
        expected = torch.linalg.matrix_norm(exact)
        assert norms.dtype == torch.float32
        assert ((norms - expected).abs() <= 4 * unit_roundoff(torch.float32) * expected).all()


@pytest.mark.parametrize("side", SIDES)
def test_lines_of_a_first_step_get_one_norm(balance_, side):
    updates = uneven((2, 8, 20))
    whole = torch.linalg.matrix_norm(updates)
    balance_(updates, torch.zeros_like(moments_of((2, 8, 20), side)), BETA)
    lines = torch.linalg.vector_norm(updates, dim=-1 if side == "rows" else -2)
    torch.testing.assert_close(lines, (whole / lines.size(-1) ** 0.5)[:, None].expand_as(lines), rtol=1e-5, atol=0)


@pytest.mark.parametrize("side", SIDES)
def test_zeros_stay_zeros_and_a_nan_in_its_matrix(balance_, side):
    updates, moments = uneven((3, 6, 5)), moments_of((3, 6, 5), side)
    moments[0] = 0
    updates[0], updates[1, 2, 3], updates[2, 1], updates[2, :, 4] = 0, math.nan, 0, 0
    moments[2].select(-2 if side == "rows" else -1, 1 if side == "rows" else 4).zero_()  # of a line that was never used
    alone, alone_moments = updates[2:].clone(), moments[2:].clone()
    norms = balance_(updates, moments, BETA)
    balance_(alone, alone_moments, BETA)
    assert not updates[0].any() and not moments[0].any() and norms[0] == 0
    assert updates[1].isnan().any() and norms[1].isnan()
    assert not updates[2, 1].any() and not updates[2, :, 4].any() and updates[2].isfinite().all()
    assert torch.equal(updates[2:], alone) and torch.equal(moments[2:], alone_moments)


@pytest.mark.parametrize("side", SIDES)
def test_neither_batch_threads_nor_strides_change_a_bit(balance_, side):
    shape = 5, 64, 300
    updates, moments = uneven(shape, torch.bfloat16), moments_of(shape, side)

    def result(X: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        X, v = X.clone(memory_format=torch.preserve_format), v.clone()
        return X, v, balance_(X, v, BETA)

    expected = result(updates, moments)
    for threads in 1, 2, 3:
        torch.set_num_threads(threads)
        alone = [result(x, v) for x, v in zip(updates.split(1), moments.split(1))]
        assert all(torch.equal(torch.cat(some), each) for some, each in zip(zip(*alone), expected))
        assert all(map(torch.equal, result(updates.mT.contiguous().mT, moments), expected))


@pytest.mark.parametrize("by", ["rows", "long_side"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)], ids=str)
def test_steps_are_those_of_dion(kernel, shape, by):
    """On the long side as on rows; the updates keep the polar factor's norm."""
    generator = torch.Generator("cpu").manual_seed(3)
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = kernel.Muon([("w", p)], lr=0.5, weight_decay=0.0, eps=0.0, momentum=0.0, second_moment=by)
    side = "rows" if by == "rows" or shape[0] >= shape[1] else "columns"
    moments = torch.zeros((shape[0], 1) if side == "rows" else (1, shape[1]), dtype=torch.float64)
    for _ in range(4):
        before, p.grad = p.detach().clone(), torch.randn(shape, generator=generator, device="cpu").to(p)
        optimizer.step()
        factor = kernel.orthogonalize(p.grad, eps=0.0)
        balanced, moments = oracles.balance(factor, moments, 0.95, side)
        expected = 0.5 * 0.2 * math.sqrt(max(shape)) * balanced
        torch.testing.assert_close(before - p, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["second_moment"], moments, rtol=1e-12, atol=0)


@pytest.mark.parametrize("by", ["rows", "long_side"])
def test_renormalized_updates_have_the_root_mean_square_of_the_paper(kernel, by):
    """0.2 lr, whatever the iteration leaves of a polar factor's norm."""
    p = nn.Parameter(torch.zeros(12, 30, dtype=torch.float64))
    settings = {"second_moment": by, "renormalize": "frobenius", "ns_steps": 2, "lr": 0.5}
    optimizer = kernel.Muon([("w", p)], weight_decay=0.0, **settings)
    p.grad = uneven((1, 12, 30))[0].double()
    optimizer.step()
    assert p.square().mean().sqrt().item() == pytest.approx(0.5 * 0.2, rel=1e-12)
