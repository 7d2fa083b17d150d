"""Rates of groups: which of those that are given counts, the factor of AdamW's, and what states had before factors."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, take_steps

pytestmark = pytest.mark.kernels_ci


@pytest.mark.parametrize(
    "group, constructor, expected",
    [
        ({}, dict(lr=0.25), (0.25, 1.0)),
        ({}, dict(lr=0.25, adamw_lr=0.5), (0.25, 2.0)),
        ({"lr": 0.75}, dict(lr=0.25, adamw_lr=0.5), (0.75, 1.0)),
        ({"lr": 0.75, "adamw_lr": 1.5}, dict(lr=0.25, adamw_lr=0.5), (0.75, 2.0)),
        ({"lr": None, "adamw_lr": None}, dict(lr=0.25, adamw_lr=0.5), TypeError),
        ({"use_muon": False}, dict(lr=0.25, adamw_lr=0.5), (0.25, 2.0)),
        ({"use_muon": False, "lr": 0.75}, dict(lr=0.25, adamw_lr=0.5), (0.75, 1.0)),
        ({"lr_factor": 4, "adamw_lr": 1.5}, dict(lr=0.25), (0.25, 4.0)),
        ({}, dict(lr=torch.tensor(0.25), adamw_lr=0.5), (0.25, 2.0)),
        ({}, dict(lr=0.25, adamw_lr=torch.tensor(0.5)), (0.5, 1.0)),
        ({}, dict(lr=0.0, adamw_lr=0.5), (0.5, 1.0)),
        ({}, dict(lr=5e-324, adamw_lr=0.5), (0.5, 1.0)),
        ({}, dict(lr=0.25, adamw_lr=0.0), (0.25, 0.0)),
    ],
    ids=str,
)
def test_nearest_learning_rate_wins(kernel, group, constructor, expected):
    """It is a factor of `lr` where there is one; a tensor is a knob of its own, and 0 has no multiples."""
    group = {"params": [("norm.weight", Parameter(torch.ones(8)))], **group}
    if expected is TypeError:
        with pytest.raises(TypeError, match="lr must be a number, got None"):
            kernel.Muon([group], **constructor)
        return
    (made,) = kernel.Muon([group], **constructor).param_groups
    assert (made["lr"], made["lr_factor"]) == expected


def test_a_factor_is_refused_for_matrices(kernel):
    group = {"params": [Parameter(torch.ones(8, 8))], "lr_factor": 0.5}
    with pytest.raises(ValueError, match=r"lr_factor=0\.5 is of groups of the fallback: in one of Muon's write lr"):
        kernel.Muon([group])
    optimizer = kernel.Muon(named_parameters().items())
    with pytest.raises(ValueError, match=r"lr_factor=0\.5 is of groups of the fallback"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("lr", [0.5, None])
def test_a_state_from_before_factors_has_absolute_rates(kernel, lr):
    """As format 1 has them, and torch's optimizers; where it says no `lr`, rate and factor stay as they are here."""
    params, others = named_parameters(), named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.5, adamw_lr=0.125)
    take_steps(optimizer, params, range(2))
    old = copy.deepcopy(optimizer.state_dict())
    for group, rate in zip(old["param_groups"], (0.5, 0.125)):
        group.update(lr=rate, state_format=1)
        for key in ("lr_factor",) if lr else ("lr_factor", "lr"):
            del group[key]
    for name, p in params.items():
        others[name].data.copy_(p.data)
    later = kernel.Muon(others.items(), lr=0.5, adamw_lr=0.125)
    later.load_state_dict(old)
    expected = [(0.5, 1.0), (0.125, 1.0)] if lr else [(0.5, 1.0), (0.5, 0.25)]
    assert [(group["lr"], group["lr_factor"]) for group in later.param_groups] == expected
    take_steps(optimizer, params, [2])
    take_steps(later, others, [2])
    assert same_bits(params, others)
