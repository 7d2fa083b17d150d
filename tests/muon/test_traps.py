"""What broke other optimizers, or this one: tested shut."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

from tests.support.small_model import STATE, named_parameters, same_bits, set_gradients, take_steps

pytestmark = pytest.mark.kernels_ci


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


@pytest.mark.parametrize("name", ["up.weight", "wte.weight"])
def test_parameter_with_a_changed_shape_is_refused(kernel, name):
    """It is refused before anything moves. torch's fused AdamW would read and write past the end of the old state."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    params[name].data = torch.cat([params[name].data, params[name].data])
    set_gradients(params, 1)
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match="its parameter"):
        optimizer.step()
    assert same_bits(params, before)


def test_frozen_parameter_with_a_gradient_is_updated(kernel):
    """As torch's optimizers do."""
    params = named_parameters()
    params["up.weight"].requires_grad_(False)
    optimizer = kernel.Muon(params.items())
    before = params["up.weight"].clone()
    take_steps(optimizer, params, [0])
    assert not torch.equal(params["up.weight"], before)
    assert set(optimizer.state[params["up.weight"]]) == STATE[True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casting_the_model_keeps_momentum_and_resumes(kernel, dtype):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02)
    take_steps(optimizer, params, [0])
    for p in params.values():
        p.data = p.data.to(dtype)
    take_steps(optimizer, params, [1])
    assert optimizer.state[params["up.weight"]]["momentum_buffer"].dtype == torch.float32
    resumed = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    other = kernel.Muon(resumed.items())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(optimizer, params, [2, 3])
    take_steps(other, resumed, [2, 3])
    assert same_bits(params, resumed)


def test_meta_parameters_get_state_once_they_are_real(kernel):
    params = {name: Parameter(p.detach().to("meta")) for name, p in named_parameters().items()}
    optimizer = kernel.Muon(params.items())
    assert not optimizer.state
    for group in optimizer.param_groups:
        group["params"] = [Parameter(torch.ones(p.shape)) for p in group["params"]]
    optimizer.state_dict()
    assert len(optimizer.state) == len(params)


def test_vector_in_a_group_of_matrices_raises(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    optimizer.param_groups[0]["params"][0] = Parameter(torch.ones(24 * 12))
    with pytest.raises(ValueError, match=r"up.weight, which is no matrix: its shape is \(288,\)"):
        optimizer.step()


def test_parameter_appended_to_a_group_is_explained(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    optimizer.param_groups[0]["params"].append(Parameter(torch.ones(8, 8)))
    assert len(optimizer.explain().rows) == len(named_parameters()) + 1


@pytest.mark.parametrize("spoil", ["foreign", "keys", "settings", "hook"])
def test_failed_load_changes_nothing(kernel, spoil):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02)
    take_steps(optimizer, params, [0])
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    if spoil == "foreign":
        adamw = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
        take_steps(adamw, params, [0])
        saved = adamw.state_dict()
    elif spoil == "keys":
        saved["state"][0]["exp_avg"] = saved["state"][0].pop("momentum_buffer")
    elif spoil == "settings":
        saved["param_groups"][1]["momentum"] = 5.0
    else:
        optimizer.register_load_state_dict_pre_hook(lambda _, given: given["param_groups"][0].update(ns_steps=0))
    with pytest.raises(ValueError):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for i, state in before["state"].items():
        assert all(torch.equal(after["state"][i][key], value) for key, value in state.items())


def test_state_of_torchs_muon_loads(kernel):
    p, q = (Parameter(torch.ones(8, 12)) for _ in range(2))
    theirs = torch.optim.Muon([p], lr=0.1)
    p.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    theirs.step()
    ours = kernel.Muon([q])
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[q]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
    assert ours.param_groups[0]["lr"] == 0.1 and ours.param_groups[0]["use_muon"]


def test_distributed_state_dict_round_trip_is_exact(kernel):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    twin = copy.deepcopy(model)
    optimizer = kernel.Muon(model.named_parameters(), lr=0.02)
    take_steps(optimizer, dict(model.named_parameters()), [0])
    twin.load_state_dict(model.state_dict())
    other = kernel.Muon(twin.named_parameters())
    set_optimizer_state_dict(twin, other, get_optimizer_state_dict(model, optimizer))
    take_steps(optimizer, dict(model.named_parameters()), [1])
    take_steps(other, dict(twin.named_parameters()), [1])
    assert same_bits(model.state_dict(), twin.state_dict())


def test_orthogonalize_supports_autograd_and_vmap(kernel):
    G = Parameter(torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(0)))
    assert kernel.orthogonalize(G, dtype=torch.float32).requires_grad
    one_by_one = torch.vmap(lambda X: kernel.orthogonalize(X, dtype=torch.float32))(G.detach())
    gain = torch.tensor([a for a, _, _ in kernel.polar_express()]).prod().item()
    torch.testing.assert_close(
        one_by_one, kernel.orthogonalize(G.detach(), dtype=torch.float32), rtol=0, atol=16 * gain * 2**-23
    )
