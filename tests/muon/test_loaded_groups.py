"""Groups of a saved state: tensors that groups share, names that decide which state is whose, and lost settings."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, take_steps


def test_groups_that_share_a_tensor_take_unlike_numbers(kernel):
    optimizer = kernel.Muon(named_parameters().items(), lr=torch.tensor(0.02))
    saved = copy.deepcopy(optimizer.state_dict())
    first, second = saved["param_groups"]
    first["lr"], second["lr"] = torch.tensor(0.5), torch.tensor(0.25)
    optimizer.load_state_dict(saved)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]


def test_equal_tensors_that_are_not_shared_stay_apart(kernel):
    groups = [{"params": [pair], "lr": torch.tensor(0.02)} for pair in named_parameters().items()]
    optimizer = kernel.Muon(groups)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups[1:]] == pytest.approx([0.02] * (len(groups) - 1))


def test_names_that_only_begin_as_made_up_ones_are_compared(kernel):
    params = {f"param_{i}.weight": Parameter(torch.ones(8, 8) + i) for i in range(2)}
    saved = kernel.Muon(params.items()).state_dict()
    with pytest.raises(ValueError, match="saved in another order"):
        kernel.Muon(reversed(list(params.items()))).load_state_dict(saved)


def test_a_named_group_whose_settings_are_lost_is_refused(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    last = saved["param_groups"][-1]
    saved["param_groups"][-1] = {key: last[key] for key in ("params", "param_names")}
    with pytest.raises(ValueError, match="no settings for the group of"):
        optimizer.load_state_dict(saved)


def test_the_same_parameters_in_other_groups_are_refused(kernel):
    params = named_parameters()
    saved = kernel.Muon(params.items()).state_dict()
    other = kernel.Muon([{"params": [pair]} for pair in params.items()])
    with pytest.raises(ValueError, match="same parameters in other groups: make the groups as they were"):
        other.load_state_dict(saved)


def test_corrected_decay_without_its_rate_is_refused(kernel):
    """As in a file that somebody has edited. The next step could not decay."""
    optimizer = kernel.Muon(named_parameters().items())
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["decay_mode"] = "corrected"
    with pytest.raises(ValueError, match="needs a decay_lr"):
        optimizer.load_state_dict(saved)
    assert {group["decay_mode"] for group in optimizer.param_groups} == {"decoupled"}
    for group in saved["param_groups"]:
        group["decay_lr"] = 0.02
    optimizer.load_state_dict(saved)
