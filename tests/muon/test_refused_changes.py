"""A changed setting that no plan can be made with: the step raises, and the state is as it was before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_model import same_bits, set_gradients, state_of, take_steps

SHAPES = {"up.weight": (24, 12), "mixed.weight": (6, 8, 12), "up.bias": (24,)}
UNSAFE = {"ns_method": "gram", "ns_coefficients": "polar_express", "ns_dtype": "bfloat16", "equalize": "rows"}
# By name: settings of all groups at first, those that the first two then get, and the error.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "the other branch": ({}, {"use_muon": True}, "Muon was asked for mixed"),
    "second moments dropped": ({"second_moment": "rows"}, {"second_moment": "none", **UNSAFE}, "not safe"),
    "8 bits": ({}, {"momentum_dtype": "int8", **UNSAFE}, "not safe"),
}


def made(kernel, settings):
    """Return an optimizer of three groups, Muon's and two of the fallback, and their parameters."""
    params = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    groups = [{"params": [pair], "use_muon": pair[0] == "up.weight"} for pair in params.items()]
    return kernel.Muon(groups, lr=0.1, **settings), params


def stepped(optimizer, params):
    take_steps(optimizer, params, range(2))


def loaded(optimizer, params):
    stepped(optimizer, params)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("begin", [stepped, loaded], ids=["after steps", "after a load"])
@pytest.mark.parametrize("first, change, error", CASES.values(), ids=CASES)
def test_a_refused_change_loses_no_state(kernel, first, change, error, begin: Callable):
    """AdamW's averages, second moments and momentum: once the setting is back, training goes on with them."""
    optimizer, params = made(kernel, first)
    begin(optimizer, params)
    before, settings = copy.deepcopy(state_of(optimizer, params)), [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups[:2]:
        group.update(change)
    set_gradients(params, 2)
    for action in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match=error):
            action()
        assert same_bits(state_of(optimizer, params), before)
    for group, old in zip(optimizer.param_groups, settings):
        group.update(old)
    optimizer.step()
    assert state_of(optimizer, params).keys() == before.keys()


def test_what_others_keep_in_the_state_may_be_of_any_kind(kernel):
    """When a change of settings is refused, and when it is made."""
    optimizer, params = made(kernel, {"second_moment": "rows"})
    stepped(optimizer, params)
    p = params["up.weight"]
    with torch.inference_mode():
        slow = torch.ones(24, 12)  # whose changes torch does not count
    optimizer.state["tokens seen"], optimizer.state[p]["slow"] = 3, slow
    set_gradients(params, 2)
    optimizer.param_groups[0].update(second_moment="none", **UNSAFE)
    with pytest.raises(ValueError, match="not safe"):
        optimizer.step()
    assert {"slow", "second_moment"} <= optimizer.state[p].keys()
    optimizer.param_groups[0].update(ns_method="auto", ns_dtype=None)
    optimizer.step()
    assert optimizer.state["tokens seen"] == 3 and optimizer.state[p].keys() == {"momentum_buffer", "slow"}
    assert optimizer.state[p]["slow"] is slow


def test_a_parameter_that_no_plan_can_have_gets_no_state(kernel):
    optimizer, params = made(kernel, {})
    stepped(optimizer, params)
    count = len(optimizer.state)
    group = optimizer.param_groups[0]
    group["params"].append(nn.Parameter(torch.ones(6, 8, 12)))
    group["param_names"].append("late.weight")
    with pytest.raises(ValueError, match="Muon was asked for late"):
        optimizer.step()
    assert len(optimizer.state) == count
