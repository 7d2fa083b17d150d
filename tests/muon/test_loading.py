"""Loading a state: through hooks, under any default device, and at the end of a schedule."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.small_model import named_parameters, same_bits, serialized, state_of, take_steps


def test_a_parameter_in_the_place_of_another_gets_its_state_with_a_warning(kernel):
    """A layer that was replaced; where all names differ, a wrapper has renamed them."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    renamed = {"new.weight" if name == "up.weight" else name: p for name, p in params.items()}
    other = kernel.Muon(renamed.items())
    with pytest.warns(UserWarning, match="the state has up.weight, and this optimizer has new.weight instead"):
        other.load_state_dict(optimizer.state_dict())
    p = params["up.weight"]
    assert torch.equal(other.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
    all_renamed = kernel.Muon({f"net.{name}": p for name, p in params.items()}.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_renamed.load_state_dict(optimizer.state_dict())


def test_a_parameter_without_a_name_is_no_other_one_than_that_of_the_file(kernel, recwarn):
    """As in a script that names the parameters of one of its groups alone."""
    params = named_parameters()
    named = [(name, p) for name, p in params.items() if p.ndim == 2]
    rest = [(name, p) for name, p in params.items() if p.ndim == 1]
    optimizer = kernel.Muon([{"params": named}, {"params": rest}])
    other = kernel.Muon([{"params": named}, {"params": [p for _, p in rest]}])
    recwarn.clear()
    other.load_state_dict(optimizer.state_dict())
    assert not recwarn.list


def test_hooks_see_and_change_what_is_saved_and_loaded(kernel):
    """As of every torch.optim.Optimizer: they may wrap the dict, and unwrap it."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), adjust_lr_fn=lambda rows, cols: 1.0)
    take_steps(optimizer, params, [0])
    plain = optimizer.state_dict()
    optimizer.register_state_dict_post_hook(lambda _, saved: {"optimizer": saved, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, loaded: loaded["optimizer"])
    wrapped = optimizer.state_dict()
    assert wrapped["epoch"] == 3 and wrapped["optimizer"]["param_groups"] == plain["param_groups"]
    optimizer.load_state_dict(wrapped)
    with pytest.raises(ValueError, match="got the keys more"):
        optimizer.load_state_dict({"optimizer": {"more": wrapped}})


def test_state_is_loaded_under_any_default_device(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    saved, before = optimizer.state_dict(), copy.deepcopy(state_of(optimizer, params))
    with torch.device("meta"):
        optimizer.load_state_dict(saved)
    assert same_bits(state_of(optimizer, params), before)


def test_a_schedule_that_ended_just_below_zero_is_saved_and_loaded(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = -2.6e-18, 0.9  # a changed setting has all of them checked
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == -2.6e-18


def as_numpys(value):
    return tuple(map(as_numpys, value)) if isinstance(value, tuple) else np.float64(value)


@pytest.mark.parametrize(
    "key, value",
    [
        ("momentum", 0.95),
        ("adamw_eps", 1e-8),
        ("adamw_betas", (0.9, 0.95)),
        ("ns_coefficients", ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5))),
    ],
)
def test_a_numpy_number_that_equals_the_checked_one_is_saved_as_a_plain_one(kernel, key, value):
    """As a warm-up of momentum by np.interp sets it in every step once it has ended."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), **{key: value})
    for group in optimizer.param_groups:
        group[key] = as_numpys(value)
    take_steps(optimizer, params, [0])
    optimizer.load_state_dict(serialized(optimizer.state_dict()))


def test_a_state_loaded_under_inference_mode_is_trained(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    with torch.inference_mode():
        optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, params, [0])


@pytest.mark.parametrize("change", ["load", "freeze", "set"])
def test_a_checkpoint_is_saved_under_inference_mode(kernel, change):
    """As evaluation loops do, also where no step has followed what needs a new plan."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    if change == "freeze":
        params["up.weight"].requires_grad_(False).grad = None
    elif change == "set":
        optimizer.param_groups[0]["ns_steps"] = 6
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    with torch.inference_mode():
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.explain().rows
        optimizer.check_copies()
    take_steps(optimizer, params, [1])


def test_hooks_of_users_keep_their_mode(kernel):
    """Else a hook that changes parameters under no_grad would meet leaves that require gradients."""
    optimizer, modes = kernel.Muon(named_parameters().items()), []
    optimizer.register_state_dict_post_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    optimizer.register_load_state_dict_post_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    with torch.no_grad():
        optimizer.load_state_dict(optimizer.state_dict())
    assert modes == [False, False]


def test_halves_share_a_tensor_that_was_saved_twice(kernel):
    """As Accelerate does, which moves each value of a state dict to the device by itself."""
    optimizer = kernel.Muon(named_parameters().items(), lr=torch.tensor(0.02))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = group["lr"].clone()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]


@pytest.mark.parametrize("new_layer", [False, True])
def test_groups_whose_settings_are_lost_are_refused(kernel, new_layer):
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    named = list(model.named_parameters())
    saved = copy.deepcopy(get_optimizer_state_dict(model, kernel.Muon(named[:1] if new_layer else named, lr=0.5)))
    other = kernel.Muon([{"params": [pair]} for pair in named])
    if new_layer:
        set_optimizer_state_dict(model, other, saved, options=StateDictOptions(strict=False))
        assert [group["lr"] for group in other.param_groups] == [0.5, 1e-3]
    else:
        with pytest.raises(ValueError, match=r"no settings for the group of 0\.weight.*flatten_optimizer_state_dict"):
            set_optimizer_state_dict(model, other, saved)


@pytest.mark.parametrize(
    "key, saved, here",
    [
        ("ns_coefficients", [(3.4445, -4.775, 2.0315)] * 3, [(2.0, -1.5, 0.5)] * 5),
        ("split_rows", (3, 3), (2, 2, 2)),
    ],
)
def test_sequences_that_full_state_dict_has_mixed_are_refused(kernel, key, saved, here):
    """Torch puts the entries of the file over those of the optimizer, one by one, and keeps the end of a longer one."""
    model, options = nn.Linear(6, 6, bias=False), StateDictOptions(full_state_dict=True)
    ours, other = (kernel.Muon([{"params": model.named_parameters(), key: value}]) for value in (saved, here))
    state_dict = copy.deepcopy(get_optimizer_state_dict(model, ours, options=options))
    with pytest.raises(ValueError, match="torch mixes those of the file"):
        set_optimizer_state_dict(model, other, state_dict, options=options)
    set_optimizer_state_dict(model, ours, state_dict, options=options)


def test_settings_that_the_parameters_cannot_have_are_refused_before_anything_changes(kernel):
    params = named_parameters(torch.bfloat16)
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group.update(experimental_hyperball=True)
    take_steps(optimizer, params, [1])
    before = copy.deepcopy(state_of(optimizer, params))
    with pytest.raises(ValueError, match="experimental_hyperball needs float32 or float64 matrices"):
        optimizer.load_state_dict(saved)
    assert same_bits(state_of(optimizer, params), before)
    assert not any(group["experimental_hyperball"] for group in optimizer.param_groups)


def test_a_state_that_parameters_on_meta_lose_is_named(kernel):
    saved = kernel.Muon(nn.Linear(6, 6).named_parameters()).state_dict()
    optimizer = kernel.Muon(nn.Linear(6, 6, device="meta").named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(optimizer.state_dict())  # which has none to lose
    with pytest.warns(UserWarning, match="the state of weight, bias is lost: these parameters are on meta"):
        optimizer.load_state_dict(saved)


def test_loading_brings_no_momentum_that_is_offloaded_to_the_device(kernel, monkeypatch):
    """All of it may not fit there. Torch moves each tensor that it sees to the device of its parameter."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), offload=True)
    take_steps(optimizer, params, [0])
    saved, moved = optimizer.state_dict(), []
    honest = torch.optim.Optimizer._process_value_according_to_param_policy
    monkeypatch.setattr(
        torch.optim.Optimizer,
        "_process_value_according_to_param_policy",
        staticmethod(lambda *arguments, **options: moved.append(arguments) or honest(*arguments, **options)),
    )
    optimizer.load_state_dict(saved)
    assert not moved


def test_a_saved_group_makes_another_optimizer(kernel):
    saved = kernel.Muon(named_parameters().items(), lr=0.5).state_dict()["param_groups"]
    params = list(named_parameters().values())
    optimizer = kernel.Muon({**group, "params": [params[i] for i in group["params"]]} for group in saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_loaded_state_keeps_no_graph(kernel):
    """As if states were averaged with gradients on; an optimizer with a graph in its state could not be copied."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.update({key: value.clone().requires_grad_() * 2 for key, value in state.items()})
    optimizer.load_state_dict(saved)
    assert not any(value.requires_grad for state in optimizer.state.values() for value in state.values())
    copy.deepcopy(optimizer)
