"""Matrices whose names do not say whether they are tables or heads: a warning, unless modules were asked."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.muon.test_advice import noted, parameters, warned
from tests.support.small_model import named_parameters


def test_what_no_name_tells_is_not_counted_twice(kernel):
    lines, _ = warned(lambda: kernel.Muon(parameters(a__w=(8, 16, 12), up=(8, 8))))
    assert len(lines) == 1 and "stacks of matrices" in lines[0]


def test_matrices_without_names_are_said_once_with_what_to_write(kernel):
    params = list(named_parameters().values())
    (line,), optimizer = warned(lambda: kernel.Muon(params))
    assert line.startswith("3 parameters (1,056 elements), such as param_0 (40, 12): matrices without names")
    assert "Muon(model.named_parameters())" in line and "Muon(groups_for(model))" in line
    assert noted(optimizer.explain()) == kernel.route(params).notes == [line]
    assert warned(optimizer.explain)[0] == []
    (line,), _ = warned(lambda: optimizer.add_param_group({"params": [Parameter(torch.zeros(8, 8))]}))
    assert line.startswith("param_5 (8, 8): matrices without names")


def test_groups_whose_modules_were_asked_need_no_names(kernel):
    """As in a list of tensors for ZeroRedundancyOptimizer. Tables and heads alone, as in a stage, are no surprise."""
    model = nn.ModuleDict({"up": nn.Linear(16, 32), "mid": nn.Linear(32, 32), "out": nn.Linear(32, 8)})
    groups = kernel.groups_for(model)
    nameless = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    table = kernel.groups_for(nn.ModuleDict({"words": nn.Embedding(64, 16)}))
    for made in (nameless, table):
        lines, optimizer = warned(partial(kernel.Muon, made))
        assert lines == noted(optimizer.explain()) == []
    heads = kernel.groups_for(nn.ModuleDict({"lm_head": nn.Linear(16, 64, bias=False)}))
    assert warned(lambda: optimizer.add_param_group(heads[0]))[0] == []
    (line,), _ = warned(lambda: kernel.Muon([p for group in nameless for p in group["params"]]))
    assert "matrices without names" in line
    (line,), _ = warned(lambda: kernel.Muon([("embedding.weight", table[0]["params"][0][1])]))
    assert "no matrix" in line


def test_names_in_a_sequence_of_modules_say_nothing_and_the_modules_do(kernel):
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.Linear(32, 100))
    (line,), _ = warned(lambda: kernel.Muon(model.named_parameters()))
    assert line.startswith("3 parameters (5,312 elements), such as 2.weight (100, 32): matrices without names, or with")
    assert warned(lambda: kernel.Muon(kernel.groups_for(model)))[0] == []


@pytest.mark.parametrize(
    "names, said",
    [
        (["weight"], []),
        (["weight", "up.weight"], ["weight"]),
        (["weight", "weight"], ["2 parameters"]),
        (["0.weight", "2.weight"], ["2 parameters"]),
        (["0.weight", "2.weight", "wte.weight"], []),
    ],
    ids=str,
)
def test_numbers_say_nothing_unless_a_table_has_a_name_and_weight_alone_is_one_layer_at_most(kernel, names, said):
    groups = [{"params": [(name, Parameter(torch.ones(8, 8)))]} for name in names]
    lines = [line for line in warned(lambda: kernel.Muon(groups))[0] if "matrices without names" in line]
    assert [line.split(" (")[0] for line in lines] == said


@pytest.mark.parametrize(
    "make",
    [
        lambda kernel, p: kernel.Muon([{"params": [p], "use_muon": True}]),
        lambda kernel, p: kernel.Muon([p], is_muon=lambda name, p: True),
        lambda kernel, p: kernel.Muon([{"params": [p], "param_names": ["w"]}]),
        lambda kernel, p: kernel.Muon([Parameter(torch.zeros(8))]),
    ],
    ids=["use_muon", "is_muon", "param_names", "a vector"],
)
def test_names_that_decide_nothing_are_not_missed(kernel, make):
    assert warned(lambda: make(kernel, Parameter(torch.ones(8, 8))))[0] == []
