"""One step: what it reads, what it changes, and what it must leave alone."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, set_gradients, take_steps

pytestmark = pytest.mark.kernels_ci


def test_live_lr_is_used_as_number_or_tensor(kernel):
    results = []
    for lr in (0.02, torch.tensor(0.02, dtype=torch.float64)):
        params = named_parameters()
        optimizer = kernel.Muon(params.items(), lr=1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        take_steps(optimizer, params, range(2))
        results.append(params)
    torch.testing.assert_close(results[0]["up.weight"], results[1]["up.weight"], rtol=0, atol=0)
    # torch's fused AdamW reads a tensor in float32.
    torch.testing.assert_close(results[0]["up.bias"], results[1]["up.bias"], rtol=1e-6, atol=1e-6)


def test_gradients_are_left_unchanged(kernel):
    for nesterov in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            params = named_parameters(dtype)
            optimizer = kernel.Muon(params.items(), nesterov=nesterov)
            set_gradients(params, seed=1)
            before = {name: p.grad.clone() for name, p in params.items()}
            optimizer.step()
            assert all(torch.equal(p.grad, before[name]) for name, p in params.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_buffer_is_the_average_of_gradients(kernel, dtype):
    """Normalising the direction must not reach the buffer, not even where no cast separates the two."""
    params = named_parameters(dtype)
    optimizer = kernel.Muon(params.items(), lr=0.0, momentum=0.75, nesterov=False, ns_dtype=dtype)
    set_gradients(params, seed=2)
    optimizer.step()
    for name in ("up.weight", "down.weight"):
        p = params[name]
        assert torch.equal(optimizer.state[p]["momentum_buffer"], 0.25 * p.grad)  # a power of two: exact


def test_closure_runs_with_gradients_and_returns_its_loss(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    assert optimizer.step(lambda: (params["up.weight"] ** 2).sum().mul(2).requires_grad_() + 1).requires_grad


@pytest.mark.parametrize("name", ["up.weight", "wte.weight"])
def test_strides_of_parameters_and_gradients_do_not_matter(kernel, name):
    """torch's fused AdamW for CPUs looks at no strides: the wrong elements would meet, silently."""
    results = []
    for turned in (False, True):
        params = named_parameters()
        if turned:
            params[name] = Parameter(params[name].detach().mT.contiguous().mT)
        optimizer = kernel.Muon(params.items())
        set_gradients(params, 1)
        optimizer.step()
        set_gradients(params, 2)
        if turned:
            params[name].grad = params[name].grad.contiguous()
        else:
            params[name].grad = params[name].grad.mT.contiguous().mT
        optimizer.step()
        results.append(params[name].detach())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_maximize_descends_on_the_negated_gradient(kernel):
    params, mirrored = named_parameters(), named_parameters()
    take_steps(kernel.Muon(params.items()), params, [1])
    set_gradients(mirrored, 1)
    for p in mirrored.values():
        p.grad = -p.grad
    kernel.Muon(mirrored.items(), maximize=True).step()
    assert same_bits(params, mirrored)


def test_sparse_gradients_are_refused_before_anything_moves(kernel):
    params = named_parameters()
    before = copy.deepcopy(params)
    optimizer = kernel.Muon(params.items())
    set_gradients(params, 1)
    params["wte.weight"].grad = params["wte.weight"].grad.to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert same_bits(params, before)


def test_closure_is_called_once_before_anything_else(kernel):
    params, twin = named_parameters(), named_parameters()
    optimizer, reference = kernel.Muon(params.items()), kernel.Muon(twin.items())
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        set_gradients(params, 0)
        return torch.tensor(7.0)

    assert optimizer.step(closure) == 7 and calls == [True]
    take_steps(reference, twin, [0])
    assert same_bits(params, twin)


def test_backward_through_changed_parameters_raises(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    for name in ("up.weight", "wte.weight"):  # one of Muon's, one of AdamW's
        p = params[name]
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_fallback_equals_torchs_fused_adamw(kernel):
    params, torchs = named_parameters(), named_parameters()
    settings = dict(lr=0.01, weight_decay=0.3)
    optimizer = kernel.Muon(
        params.items(), **settings, is_muon=lambda *_: False, adamw_betas=(0.8, 0.9), adamw_eps=1e-5
    )
    reference = torch.optim.AdamW(torchs.values(), **settings, betas=(0.8, 0.9), eps=1e-5, fused=True)
    take_steps(optimizer, params, range(3))
    take_steps(reference, torchs, range(3))
    assert same_bits(params, torchs)


def test_eps_bounds_the_step_of_small_gradients(kernel):
    moved = []
    for eps in (0.0, 1.0):
        p = Parameter(torch.zeros(8, 8))
        optimizer = kernel.Muon([p], lr=1.0, eps=eps, momentum=0.0, ns_dtype="float32")
        p.grad = 1e-6 * torch.eye(8)
        optimizer.step()
        moved.append(p.detach().norm().item())
    # Without eps every singular value ends near 1; with it p is linear, its slope the product of the first triples.
    assert moved[0] > 1 and moved[1] < 1e-2


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e30), (torch.float32, 1e-30), (torch.float64, 2.0**200)])
@pytest.mark.parametrize("work_dtype", ["float16", "bfloat16", "float32"])
def test_step_is_independent_of_the_gradients_scale(kernel, dtype, scale, work_dtype):
    results = []
    for factor in (1.0, scale):
        p = Parameter(torch.zeros(12, 20, dtype=dtype))
        optimizer = kernel.Muon([p], lr=1.0, eps=0.0, ns_dtype=work_dtype)
        p.grad = factor * torch.randn(12, 20, dtype=dtype, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        results.append(p.detach())
    # 1e30 is no power of two: the scaled gradient is rounded anew, and the iteration amplifies what that changes.
    gain = np.prod([a for a, _, _ in kernel.schedules.resolve_schedule("polar_express", 5)])
    atol = 0.2 * 20**0.5 * gain * torch.finfo(getattr(torch, work_dtype)).eps
    assert results[0].norm() > 1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=min(atol, 0.5))


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_default_device_does_not_matter(kernel, default):
    params = named_parameters()
    torch.set_default_device(default)
    try:
        optimizer = kernel.Muon(params.items())
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(p.isfinite().all() for p in params.values())


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (40, 40), (300, 300)], ids=str)
def test_an_update_has_the_bits_that_orthogonalize_gives(kernel, shape):
    """Of a first step without momentum: it is the gradient's factor, however batches are packed."""
    p = Parameter(torch.zeros(shape))
    settings = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "ns_dtype": "float32"}
    optimizer = kernel.Muon([("w", p)], adjust_lr_fn=lambda rows, cols: 1.0, **settings)
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert torch.equal(-p.detach(), kernel.orthogonalize(p.grad, dtype=torch.float32))
