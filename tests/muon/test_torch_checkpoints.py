"""Loading by `get_optimizer_state_dict` and `set_optimizer_state_dict` of torch, which name parameters."""

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

from tests.support.small_model import take_steps


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


def test_torchs_checkpoints_of_torchs_muon_are_loaded_by_name(kernel):
    """They have no dtype of momentum."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False))
    theirs, ours = torch.optim.Muon(model.parameters(), lr=0.1), kernel.Muon(model.named_parameters())
    take_steps(theirs, dict(model.named_parameters()), [0])
    set_optimizer_state_dict(model, ours, get_optimizer_state_dict(model, theirs))
    p = model[0].weight
    assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[p]["momentum_buffer"])


def test_a_parameter_of_another_branch_has_no_state_in_a_file_that_names_parameters(kernel):
    """torch puts an empty dict in the place of what a file lacks."""
    model, options = (
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)),
        StateDictOptions(flatten_optimizer_state_dict=True),
    )
    named = list(model.named_parameters())
    optimizer = kernel.Muon(named, is_muon=lambda name, p: False)
    take_steps(optimizer, dict(named), [0])
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    with pytest.raises(ValueError, match=r"no momentum_buffer of 0\.weight, .* another branch updated this parameter"):
        set_optimizer_state_dict(model, kernel.Muon(named), saved, options=options)
