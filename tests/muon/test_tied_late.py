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


PARTS = {
    "columns": lambda whole: (whole[:, :4], whole[:, 4:]),
    "rows, the last ones first": lambda whole: (whole[4:], whole[:4]),
    "every other column": lambda whole: (whole[:, 1::2], whole[:, ::2]),
    "no row and all": lambda whole: (whole[:0], whole),
}


@pytest.mark.parametrize("cut", PARTS.values(), ids=PARTS)
def test_parts_of_one_memory_without_a_common_element_are_trained_like_copies(kernel, cut):
    trained = []
    for part in (lambda x: x, torch.clone):
        params = [nn.Parameter(part(each)) for each in cut(torch.arange(64.0).view(8, 8))]
        optimizer = kernel.Muon(zip(("a", "b"), params), lr=0.1, ns_dtype="float32")
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        trained.append([p.detach() for p in params])
    torch.testing.assert_close(*trained)


def test_parts_with_gaps_that_begin_at_one_element_are_refused(kernel):
    whole = torch.ones(8, 8)
    parts = [nn.Parameter(part) for part in (whole[:, ::2], whole[:, :4])]
    with pytest.raises(ValueError, match="share memory"):
        kernel.Muon(zip(("a", "b"), parts))
