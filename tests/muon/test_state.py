"""State: there from the start, exact through files and copies, and in line with the parameters of the moment."""

import copy
import io
import pickle

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import STATE, named_parameters, same_bits, take_steps

pytestmark = pytest.mark.kernels_ci


def serialized(state_dict):
    """The state dict after a round trip through a file, read with weights_only."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_exists_from_the_start(kernel):
    """It is zero, with the same keys for all parameters of a branch."""
    optimizer = kernel.Muon(named_parameters().items())
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            assert set(state) == STATE[group["use_muon"]]
            assert all(not value.any() for value in state.values())


@pytest.mark.parametrize("split", [0, 1, 3])
def test_run_resumed_from_a_file_continues_bit_for_bit(kernel, split):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, ns_dtype=torch.bfloat16, ns_coefficients=[(2, -1.5, 0.5)])
    take_steps(optimizer, params, range(split))
    resumed = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    other = kernel.Muon(resumed.items(), lr=1.0)
    other.load_state_dict(serialized(optimizer.state_dict()))
    take_steps(optimizer, params, range(split, 5))
    take_steps(other, resumed, range(split, 5))
    assert same_bits(params, resumed)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_continue_bit_for_bit_with_their_settings(kernel, duplicate):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02, adamw_lr=0.005)
    take_steps(optimizer, params, range(2))
    other, others = duplicate((optimizer, params))
    take_steps(optimizer, params, range(2, 4))
    take_steps(other, others, range(2, 4))
    assert same_bits(params, others)
    fresh = [("new.weight", Parameter(torch.zeros(8, 8))), ("new.bias", Parameter(torch.zeros(8)))]
    other.add_param_group({"params": fresh})
    assert other.param_groups[-1]["lr"] == 0.005


def test_frozen_parameters_have_no_state_until_trained(kernel):
    params = named_parameters()
    params["up.weight"].requires_grad_(False)
    optimizer = kernel.Muon(params.items())
    assert params["up.weight"] not in optimizer.state
    params["up.weight"].requires_grad_(True)
    take_steps(optimizer, params, [0])
    assert set(optimizer.state[params["up.weight"]]) == STATE[True]


def test_replaced_parameters_get_new_state(kernel):
    """Stale state goes. Wrappers that shard or cast a model rewrite the groups after construction."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    old = params["up.weight"]
    params["up.weight"] = Parameter(torch.ones(24, 12))
    optimizer.param_groups[0]["params"][0] = params["up.weight"]
    take_steps(optimizer, params, [0])
    assert old not in optimizer.state
    assert set(optimizer.state[params["up.weight"]]) == STATE[True]
    assert len(optimizer.state_dict()["state"]) == len(params)


def test_state_of_other_parameters_is_refused(kernel):
    """It is refused before anything is loaded."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [1])
    saved = optimizer.state_dict()
    branches = ["wte.weight", "up.bias", "norm.weight"], ["up.weight", "down.weight"]
    swapped = kernel.Muon([{"params": [(name, params[name]) for name in names]} for names in branches])
    with pytest.raises(ValueError, match=r"size of|saved for Muon and is AdamW's here"):
        swapped.load_state_dict(saved)
    reordered = {name: params[name] for name in ("wte.weight", "down.weight", "up.bias", "up.weight", "norm.weight")}
    other = kernel.Muon(reordered.items())
    with pytest.raises(ValueError, match="saved in another order"):
        other.load_state_dict(saved)
    assert not other.state[params["up.weight"]]["momentum_buffer"].any()


@pytest.mark.parametrize("saved, words", [(2, "saved in format 2, known here are 1 to 1"), ("1", "format 1, known")])
def test_state_of_an_unknown_format_is_refused(kernel, saved, words):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    assert all(group["state_format"] == 1 for group in optimizer.state_dict()["param_groups"])
    later = copy.deepcopy(optimizer.state_dict())
    later["param_groups"][0]["state_format"] = saved
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(later)
