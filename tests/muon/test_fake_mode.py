"""Nothing fake gets into an optimizer of real parameters under FakeTensorMode: real steps would not move them then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, set_gradients, state_of, take_steps

REFUSAL = "^under FakeTensorMode this optimizer needs fake parameters: make model and optimizer there"
SETTINGS = dict(lr=0.1, fallback="nadamw", second_moment="rows")


def more_steps(optimizer) -> None:
    """A changed setting, for which whatever comes next makes a new plan."""
    optimizer.param_groups[0]["ns_steps"] = 4


CALLS = {
    "step": lambda optimizer, saved: optimizer.step(),
    "explain": lambda optimizer, saved: optimizer.explain(),
    "warmup": lambda optimizer, saved: optimizer.warmup(budget=0.0),
    "load_state_dict": lambda optimizer, saved: optimizer.load_state_dict(saved),
    "add_param_group": lambda optimizer, saved: optimizer.add_param_group(
        {"params": [("more.weight", Parameter(torch.ones(8, 8)))]}
    ),
}


@pytest.mark.parametrize("allow", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_what_would_keep_fakes_of_real_parameters_is_refused_and_later_steps_move_them(kernel, call, allow):
    params, twins = named_parameters(), named_parameters()
    optimizer, twin = kernel.Muon(params.items(), **SETTINGS), kernel.Muon(twins.items(), **SETTINGS)
    for each, theirs in ((optimizer, params), (twin, twins)):
        take_steps(each, theirs, [0])
        more_steps(each)
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy((params, state_of(optimizer, params)))
    set_gradients(params, 1)
    with FakeTensorMode(allow_non_fake_inputs=allow), pytest.raises(RuntimeError, match=REFUSAL):
        CALLS[call](optimizer, saved)
    assert same_bits(params, before[0]) and same_bits(state_of(optimizer, params), before[1])
    for each, theirs in ((optimizer, params), (twin, twins)):
        take_steps(each, theirs, [1, 2])
    assert same_bits(params, twins)
    assert not any(torch.equal(p, before[0][name]) for name, p in params.items())


def test_an_optimizer_of_real_parameters_is_not_made_there(kernel):
    params = named_parameters()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=REFUSAL):
        kernel.Muon(params.items(), **SETTINGS)
    optimizer = kernel.Muon(params.items(), **SETTINGS)
    before = copy.deepcopy(params)
    take_steps(optimizer, params, [0])
    assert not any(torch.equal(p, before[name]) for name, p in params.items())


@pytest.mark.parametrize("more", [{}, {"experimental_hyperball": True}], ids=str)
def test_a_model_and_an_optimizer_made_there_take_steps(kernel, more):
    """Hyperball refuses zeros, which no fake parameter shows."""
    with FakeTensorMode():
        params = named_parameters()
        optimizer = kernel.Muon(params.items(), **{**SETTINGS, **more})
        take_steps(optimizer, params, [0, 1])
        optimizer.load_state_dict(optimizer.state_dict())
        take_steps(optimizer, params, [2])
        assert len(optimizer.explain().rows) == len(params)
