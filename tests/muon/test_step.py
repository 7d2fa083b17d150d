"""One step: what it reads, what it changes, and what it must leave alone."""

import copy

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


def test_parameters_without_gradient_and_their_state_stay(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [1])
    before = copy.deepcopy([params["down.weight"], params["norm.weight"]])
    states = copy.deepcopy([optimizer.state[params[name]] for name in ("down.weight", "norm.weight")])
    set_gradients(params, 2, without=("down.weight", "norm.weight"))
    up = params["up.weight"].clone()
    optimizer.step()
    assert torch.equal(params["down.weight"], before[0]) and torch.equal(params["norm.weight"], before[1])
    for name, state in zip(("down.weight", "norm.weight"), states):
        assert all(torch.equal(optimizer.state[params[name]][key], state[key]) for key in state)
    assert not torch.equal(params["up.weight"], up)


def test_non_finite_gradient_stays_in_its_parameter(kernel):
    params, clean = named_parameters(), named_parameters()
    for tensors, poison in ((params, True), (clean, False)):
        optimizer = kernel.Muon(tensors.items())
        set_gradients(tensors, seed=3)
        if poison:
            tensors["up.weight"].grad[0, 0] = float("nan")
        optimizer.step()
    assert params["up.weight"].isnan().any()
    del params["up.weight"], clean["up.weight"]
    assert same_bits(params, clean)


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
