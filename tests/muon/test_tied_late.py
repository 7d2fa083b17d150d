"""Parameters that come to share memory after the optimizer was made: the next step raises, and changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.inside import plan_of

TIES = {"one batch": ("first.weight", "second.weight"), "of AdamW": ("embed.weight", "lm_head.weight")}


def network() -> nn.ModuleDict:
    torch.manual_seed(0)
    square = {name: nn.Linear(24, 24, bias=False) for name in ("first", "second")}
    return nn.ModuleDict({"embed": nn.Embedding(50, 24), **square, "lm_head": nn.Linear(24, 50, bias=False)})


def take_a_step(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    words = torch.arange(50)
    logits = model["lm_head"](model["second"](model["first"](model["embed"](words))))
    functional.cross_entropy(logits, words).backward()
    optimizer.step()


@pytest.mark.parametrize("names", TIES.values(), ids=TIES)
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}], ids=["alike", "in two batches"])
def test_a_step_refuses_weights_tied_by_data_as_often_as_it_is_taken(kernel, names, settings):
    model = network()
    second = [(name, p) for name, p in model.named_parameters() if name == names[1]]
    rest = [(name, p) for name, p in model.named_parameters() if name != names[1]]
    optimizer = kernel.Muon([{"params": rest}, {"params": second, **settings}])
    take_a_step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    one, other = (model.get_parameter(name) for name in names)
    other.data = one.data
    weights = copy.deepcopy(dict(model.state_dict()))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{names[0]} and {names[1]} share memory, and are different parameters"):
            take_a_step(model, optimizer)
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    other.data = one.data.clone()
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    take_a_step(model, optimizer)


def test_other_memory_makes_no_new_plan(kernel):
    """As when averaged weights are put in for an evaluation."""
    model = network()
    optimizer = kernel.Muon(model.named_parameters())
    take_a_step(model, optimizer)
    plan = plan_of(optimizer)
    for p in model.parameters():
        p.data = p.data.clone()
    take_a_step(model, optimizer)
    assert plan_of(optimizer) is plan
