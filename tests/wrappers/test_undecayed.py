"""Which parameters get no weight decay from `groups_for`."""

import torch
from torch import nn

from tests.support.model_of_many_kinds import Network


def decays(kernel, model):
    return {name: group.get("weight_decay") for group in kernel.groups_for(model) for name, _ in group["params"]}


def test_models_say_what_does_not_decay(kernel):
    """As timm's do, by the method `no_weight_decay`."""
    model = Network()
    model.no_weight_decay = lambda: {"tok.weight"}
    assert decays(kernel, model)["tok.weight"] == 0.0 and decays(kernel, model)["gate.weight"] is None
    model.no_weight_decay = lambda: {"t?k.*", "up[0].weight"}  # timm reads patterns, too
    model.add_module("up[0]", nn.Linear(8, 8))
    decay = decays(kernel, model)
    assert decay["tok.weight"] == decay["up[0].weight"] == 0.0 and decay["gate.weight"] is None


def test_a_head_of_one_output_decays_as_any_head_does(kernel):
    """And has its role. So does a table of one row; what else has one row is a vector, as magnitudes and biases are."""
    model = nn.ModuleDict({"up": nn.Linear(16, 32), "one": nn.Embedding(1, 16), "score": nn.Linear(32, 1)})
    model["scaled"] = nn.utils.parametrizations.weight_norm(nn.Linear(16, 32))
    model["token"] = nn.ParameterList([torch.zeros(1, 1, 16)])
    model["score"].probe = nn.Parameter(torch.zeros(1, 1, 32))  # as in the heads of vision models
    roles = {name: group["role"] for group in kernel.groups_for(model) for name, _ in group["params"]}
    rows = {name: role for name, role in roles.items() if role in ("output_head", "embedding")}
    assert rows == {"score.weight": "output_head", "one.weight": "embedding"}
    assert {name for name, decay in decays(kernel, model).items() if decay is None} >= rows.keys()
    vectors = {"scaled.parametrizations.weight.original0", "token.0", "score.probe", "score.bias"}
    assert {roles[name] for name in vectors} == {"vector"}
