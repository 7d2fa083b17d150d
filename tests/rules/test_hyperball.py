"""Hyperball: steps that keep the Frobenius norm of a matrix."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracles import unit_roundoff

SETTINGS = {"experimental_hyperball": True, "eps": 0.0}
SHAPES = [(24, 40), (40, 24), (16, 16)]

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.kernels_ci]


def random(shape, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    X = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float64)
    return X.to(torch.get_default_device(), dtype)


def stepped(kernel, W: Tensor, G: Tensor, lr: float = 0.1, **settings) -> Tensor:
    p = nn.Parameter(W.clone())
    optimizer = kernel.Muon([("w", p)], lr=lr, momentum=0.0, **{**SETTINGS, **settings})
    p.grad = G
    optimizer.step()
    return p.detach()


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_that_of_its_formula_whatever_the_multiplier_and_the_decay(kernel, shape, adjust_lr_fn):
    W, G = random(shape, 0), random(shape, 1)
    R, U = torch.linalg.matrix_norm(W), kernel.orthogonalize(G, eps=0.0)
    V = W - 0.1 * R * U / torch.linalg.matrix_norm(U)
    expected = R * V / torch.linalg.matrix_norm(V)
    result = stepped(kernel, W, G, adjust_lr_fn=adjust_lr_fn, weight_decay=0.3)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_hundred_steps_keep_the_norm(kernel, shape):
    """A step rounds to float32 a factor of the whole, the product with it and the result: none moves a norm by more."""
    p = nn.Parameter(random(shape, 0, torch.float32))
    before = torch.linalg.matrix_norm(p.detach().double())
    optimizer = kernel.Muon([("w", p)], lr=0.1, **SETTINGS)
    for step in range(100):
        p.grad = random(shape, step, torch.float32)
        optimizer.step()
    after = torch.linalg.matrix_norm(p.detach().double())
    assert abs(after / before - 1) <= 100 * 3 * unit_roundoff(torch.float32)


def test_nothing_moves_without_a_gradient_or_a_rate_and_a_nan_stays_in_its_matrix(kernel):
    W, G = random((3, 12, 20), 0, torch.float32), random((3, 12, 20), 1, torch.float32)
    G[1], G[2, 3, 4] = 0, math.nan
    moved = stepped(kernel, W, G, expert_keys=("w",))
    assert not torch.equal(moved[0], W[0]) and torch.equal(moved[1], W[1]) and moved[2].isnan().any()
    assert torch.equal(moved[:1], stepped(kernel, W[:1].clone(), G[:1], expert_keys=("w",)))
    still = stepped(kernel, W, G[:1].expand_as(G), lr=0.0, expert_keys=("w",))
    torch.testing.assert_close(still, W, rtol=2 * unit_roundoff(torch.float32), atol=0.0)


def test_an_overflow_changes_no_bit(kernel):
    W = random((12, 20), 0, torch.float32)
    p = nn.Parameter(W.clone())
    optimizer = kernel.Muon([("w", p)], **SETTINGS)
    optimizer.found_inf = torch.ones(())
    p.grad = random((12, 20), 1, torch.float32)
    optimizer.step()
    assert torch.equal(p.detach(), W) and not optimizer.state[p]["momentum_buffer"].any()


def test_the_length_of_a_step_is_in_metrics_and_the_rule_in_explain(kernel):
    W = random((12, 20), 0, torch.float32)
    p = nn.Parameter(W.clone())
    optimizer = kernel.Muon([("w", p)], lr=0.25, **SETTINGS)
    p.grad = random((12, 20), 1, torch.float32)
    optimizer.step()
    torch.testing.assert_close(optimizer.metrics()["muon_update_norm"], 0.25 * torch.linalg.matrix_norm(W.double()))
    (row,) = optimizer.explain().rows
    assert row.multiplier == 1.0 and row.kernel.endswith(", norm kept without decay (Hyperball, experimental)")


def test_metrics_count_a_matrix_that_is_not_finite_and_no_step_of_a_zero_update(kernel):
    p = nn.Parameter(random((3, 12, 20), 0, torch.float32))
    optimizer = kernel.Muon([("w", p)], lr=0.25, **SETTINGS, expert_keys=("w",))
    p.grad = random((3, 12, 20), 1, torch.float32)
    p.grad[1:] = 0
    optimizer.step()
    length = 0.25 * torch.linalg.matrix_norm(p.detach()[0].double())
    # The norm that is kept moves by the three roundings of a step.
    torch.testing.assert_close(optimizer.metrics()["muon_update_norm"], length, rtol=4 * 2.0**-24, atol=0.0)
    p.grad[2, 3, 4] = math.nan
    optimizer.step()
    assert optimizer.metrics()["matrices_not_finite"] == 1


def test_matrices_whose_norm_cannot_be_kept_are_refused(kernel):
    with pytest.raises(ValueError, match="keeps norms of matrices, but w is zero"):
        kernel.Muon([("w", nn.Parameter(torch.zeros(12, 20)))], **SETTINGS)
    with pytest.raises(ValueError, match="needs float32 or float64 matrices, w is"):
        kernel.Muon([("w", nn.Parameter(torch.ones(12, 20, dtype=torch.bfloat16)))], **SETTINGS)
    frozen = nn.Parameter(torch.zeros(12, 20, dtype=torch.bfloat16), requires_grad=False)
    assert kernel.Muon([("b", nn.Parameter(torch.zeros(12))), ("frozen", frozen)], **SETTINGS).param_groups
    assert kernel.Muon([("w", nn.Parameter(torch.eye(12)))], **SETTINGS).param_groups  # zeros in it do no harm


def test_a_saved_state_whose_norms_cannot_be_kept_here_is_refused_before_anything_changes(kernel):
    saved = kernel.Muon([("w", nn.Parameter(random((12, 20), 0, torch.float32)))], **SETTINGS).state_dict()
    p = nn.Parameter(random((12, 20), 0, torch.bfloat16))
    optimizer = kernel.Muon([("w", p)])
    with pytest.raises(ValueError, match="needs float32 or float64 matrices, w is"):
        optimizer.load_state_dict(saved)
    p.grad = random((12, 20), 1, torch.bfloat16)
    optimizer.step()
    assert not optimizer.param_groups[0]["experimental_hyperball"] and optimizer.state[p]["momentum_buffer"].any()


def test_a_batch_of_small_matrices_reports_the_steps_that_it_takes(kernel):
    """Each position of a convolution is a matrix, which moves by lr times its own norm, whatever their number."""
    p = nn.Parameter(random((8, 8, 3, 3), 0, torch.float32))
    norms = torch.linalg.vector_norm(p.detach().double(), dim=(0, 1))
    optimizer = kernel.Muon([("conv.weight", p)], lr=0.1, conv_mode="batched", **SETTINGS)
    assert optimizer.explain().rows[0].multiplier == 1
    p.grad = random((8, 8, 3, 3), 1, torch.float32)
    optimizer.step()
    expected = 0.1 * torch.linalg.vector_norm(norms).item()
    assert optimizer.metrics()["muon_update_norm"].item() == pytest.approx(expected, rel=1e-6)
