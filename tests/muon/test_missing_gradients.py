"""Gradients that are missing, zero or not finite: what stays, and that no other parameter notices."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.inside import plan_of
from tests.support.small_model import named_parameters, same_bits, set_gradients, take_steps

pytestmark = pytest.mark.kernels_ci


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


def test_a_gradient_that_is_missing_for_a_step_makes_no_new_plan(kernel):
    """Planning takes as long as many steps. A frozen parameter has no gradient in any of them."""
    params = named_parameters()
    params["down.weight"].requires_grad_(False)
    optimizer = kernel.Muon(params.items())
    plan = plan_of(optimizer)
    for without in ((), ("up.weight",), ("up.weight", "norm.weight")):
        set_gradients(params, 1, without=("down.weight", *without))
        optimizer.step()
        assert plan_of(optimizer) is plan


def test_a_parameter_whose_memory_is_gone_is_named(kernel):
    """As FSDP2 leaves the whole parameters of its root, which an optimizer got after a forward pass."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    set_gradients(params, 1, without=("down.weight",))
    before = copy.deepcopy(params["up.weight"])
    params["down.weight"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"the memory of down.weight .* is gone, .* or call model.reshard\(\) first"):
        optimizer.step()
    assert torch.equal(params["up.weight"], before)
    params["down.weight"].requires_grad_(False)
    optimizer.step()
    assert not torch.equal(params["up.weight"], before)


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


@pytest.mark.parametrize("mode", ["decoupled", "independent", "cautious"])
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_gradients_at_lr_zero_keep_every_bit(kernel, mode, lr, fallback, dtype):
    """Not even the sign of a zero changes, and all state is made: so checkpoints initialise optimizers."""
    params = named_parameters(dtype)
    for p in params.values():
        p.data.flatten()[:2] = torch.tensor([0.0, -0.0])
    before = copy.deepcopy(params)
    optimizer = kernel.Muon(params.items(), lr=lr, weight_decay=0.5, decay_mode=mode, fallback=fallback)
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(p.view(torch.int16).equal(before[name].view(torch.int16)) for name, p in params.items())
    assert all(len(optimizer.state[p]) in (1, 3) for p in params.values())


@pytest.mark.parametrize("shape", [(0,), (0, 8)])
def test_an_empty_parameter_needs_no_gradient(kernel, shape):
    params = {**named_parameters(), "none.weight": Parameter(torch.empty(shape))}
    optimizer, before = kernel.Muon(params.items()), copy.deepcopy(params)
    set_gradients(params, 0, without=("none.weight",))
    optimizer.step()
    assert not torch.equal(params["up.weight"], before["up.weight"])
