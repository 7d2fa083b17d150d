"""Loading a state: by torch's checkpoints, through hooks, under any default device, and at the end of a schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.small_model import named_parameters, same_bits, state_of, take_steps


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_checkpoints_are_loaded_by_name_in_any_order(kernel, flat):
    """As by a stage of a pipeline with other layers: the names of groups are then those of the stage that saved."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    named, options = list(model.named_parameters()), StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = kernel.Muon(named)
    take_steps(optimizer, dict(named), [0, 1])
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = kernel.Muon(named[::-1])
    set_optimizer_state_dict(model, other, saved, options=options)
    for _, p in named:
        assert all(torch.equal(value, other.state[p][key]) for key, value in optimizer.state[p].items())


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
