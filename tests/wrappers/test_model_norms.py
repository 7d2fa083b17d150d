"""Norms are known by their modules: AdamW updates them, and they do not decay."""

import pytest
import torch
from torch import nn

from tests.support.model_of_many_kinds import chosen


class ConvNextLayerNorm(nn.Module):
    """A norm by the name of its class."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Post(nn.LayerNorm):
    pass


class LayerNormLinear(nn.Linear):
    """As Transformer Engine's: a linear layer after a norm."""


NORMS = {
    "layer": nn.LayerNorm((8, 64)),
    "root mean square": nn.RMSNorm((8, 16)),
    "three dimensions": nn.LayerNorm((8, 16, 16)),
    "subclass": Post((8, 16)),
    "by the name of its class": ConvNextLayerNorm(8, 16),
    "three dimensions by the name of its class": ConvNextLayerNorm(8, 16, 16),
}


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("name", ["post", "embed_post"])
def test_norms_of_several_dimensions_are_norms(kernel, case, name):
    model = nn.ModuleDict({name: NORMS[case], "up": nn.Linear(16, 16, bias=False)})
    groups = kernel.groups_for(model)
    assert set(chosen(groups).values()) == {"norm", "matrix"}
    (norm,) = [group for group in groups if group["role"] == "norm"]
    assert norm["use_muon"] is False and norm["weight_decay"] == 0.0


def test_a_linear_layer_with_a_norm_is_none(kernel):
    model = nn.ModuleDict({"up": LayerNormLinear(16, 16, bias=False)})
    assert chosen(kernel.groups_for(model)) == {"up.weight": "matrix"}


@pytest.mark.parametrize("name", ["normalizer", "ln_out"])
def test_a_linear_layer_is_no_norm_whatever_its_name(kernel, name):
    """By its name alone it would be one."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({name: nn.Linear(16, 16, bias=False)})])})
    assert chosen(kernel.groups_for(model)) == {f"blocks.0.{name}.weight": "matrix"}
    (reason,) = (row.reason for row in kernel.route(model.named_parameters()).rows)
    assert reason == f"norm:{name}"


def test_an_attribute_of_a_parameter_goes_before_its_norm(kernel):
    model = nn.ModuleDict({"post": nn.RMSNorm((8, 16))})
    model["post"].weight.use_muon = True
    assert chosen(kernel.groups_for(model)) == {"post.weight": "use_muon"}


def test_scales_of_heads_are_not_decayed(kernel):
    """Decay would pull them to zero, as it would norms."""

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, 16))

    model = nn.ModuleDict({"q_clip": Clip(), "up": nn.Linear(16, 32)})
    decays = {name: group.get("weight_decay") for group in kernel.groups_for(model) for name, _ in group["params"]}
    assert decays["q_clip.scale"] == 0.0 and decays["up.weight"] is None
