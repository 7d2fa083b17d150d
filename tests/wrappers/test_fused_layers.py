"""Convolutions of attentions, and layers of any kind that write a gate and what it gates, are cut as fused ones are.

Layers, attributes and shapes are those of real classes, made small.
"""

import pytest
import torch
from torch import nn

from tests.support.model_of_many_kinds import chosen
from tests.wrappers.test_model_heads import Model


def attention(layers, **attributes):
    """A model whose only attention has these attributes and convolutions."""
    inside = Model(**layers)
    for key, value in attributes.items():
        setattr(inside, key, value)
    return nn.ModuleDict({"attn": inside})


def reasons(kernel, model, **options):
    """What each convolution is, by the end of its name."""
    kinds = chosen(kernel.groups_for(model, **options))
    return {name.rpartition(".")[0].partition(".")[2]: reason for name, reason in kinds.items() if reason != "vector"}


# By hand: layers, attributes, and what each weight is; `heads=False` changes what it says below.
BY_HEAD = {
    "timm's CoAtNet": (
        {"qkv": nn.Conv2d(32, 96, 1), "proj": nn.Conv2d(32, 32, 1)}, dict(num_heads=4, dim_head=8),
        {"qkv": "queries, keys and values: flatten 96x32 split 12*8", "proj": "convolution: flatten 32x32"},
    ),
    "timm's HaloNet": (
        {"q": nn.Conv2d(32, 32, 1), "kv": nn.Conv2d(32, 64, 1)}, dict(num_heads=4, dim_out=32),
        {"q": "queries: flatten 32x32 split 4*8", "kv": "queries, keys and values: flatten 64x32 split 8*8"},
    ),
    "guided diffusion": (
        {"qkv": nn.Conv1d(32, 96, 1)}, dict(num_heads=4),
        {"qkv": "queries, keys and values: flatten 96x32 split 12*8"},
    ),
    "a kernel": (
        {"to_q": nn.Conv2d(32, 32, 3), "to_kv": nn.Conv2d(32, 64, 3)}, dict(heads=4, dim_head=8),
        {"to_q": "queries: flatten 32x288 split 4*8", "to_kv": "queries, keys and values: flatten 64x288 split 8*8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HEAD)
def test_attentions_of_convolutions_are_cut_by_head(kernel, case):
    """Fused ones also with `heads=False`: libraries differ in the order of their rows."""
    layers, attributes, expected = BY_HEAD[case]
    model = attention(layers, **attributes)
    assert reasons(kernel, model) == expected
    whole = {
        name: reason.split(" split")[0] if reason.startswith("queries:") else reason
        for name, reason in expected.items()
    }
    assert reasons(kernel, model, heads=False) == whole


def test_a_step_of_a_fused_convolution_is_that_of_the_linear_layer(kernel):
    torch.manual_seed(0)
    layers = {"convolution": nn.Conv2d(32, 96, 1, bias=False), "linear": nn.Linear(32, 96, bias=False)}
    layers["linear"].weight.data = layers["convolution"].weight.data[:, :, 0, 0].clone()
    gradient = torch.randn(96, 32)
    for layer in layers.values():
        layer.weight.grad = gradient.reshape(layer.weight.shape).clone()
        kernel.Muon(kernel.groups_for(attention({"qkv": layer}, num_heads=4))).step()
    assert torch.equal(layers["convolution"].weight[:, :, 0, 0], layers["linear"].weight)


def test_a_fused_convolution_without_a_size_of_heads_is_told(kernel):
    """As in the autoencoders of diffusers."""
    groups = kernel.groups_for(attention({"to_qkv": nn.Conv2d(32, 96, 1)}))
    assert chosen(groups)["attn.to_qkv.weight"] == "queries, keys and values: flatten 96x32"
    (note,) = groups.choices.notes
    assert "attn.to_qkv.weight are not cut, because no head size is known" in note


def test_a_convolution_has_the_heads_of_its_attention_alone(kernel):
    """Not those of a language model around it, as its config states them."""
    model = attention({"qkv": nn.Conv2d(32, 96, 1)})
    model.config = {"head_dim": 8, "num_attention_heads": 4}
    assert reasons(kernel, model) == {"qkv": "queries, keys and values: flatten 96x32"}
    assert reasons(kernel, model, config=model.config) == {"qkv": "queries, keys and values: flatten 96x32"}


def test_keys_and_values_that_may_have_heads_of_two_sizes_stay_whole(kernel):
    """As of HaloNet: keys are as wide as queries, and values as what comes out, here 64."""
    layers = {"q": nn.Conv2d(48, 32, 1), "kv": nn.Conv2d(48, 96, 1)}
    kinds = reasons(kernel, attention(layers, num_heads=4))
    assert kinds == {"q": "queries: flatten 32x48 split 4*8", "kv": "queries, keys and values: flatten 96x48"}


def test_other_convolutions_in_an_attention_stay_whole(kernel):
    """Of several groups, transposed, and tensors beside a weight, and those of an attention that states no heads."""
    layers = {"qkv": nn.Conv2d(32, 96, 1, groups=2), "v": nn.ConvTranspose2d(32, 32, 1), "k": nn.Conv2d(32, 32, 1)}
    layers["k"].factor = nn.Parameter(torch.ones(16, 5, 3))
    kinds = chosen(kernel.groups_for(attention(layers, num_heads=4)))
    assert kinds["attn.qkv.weight"] == "convolution: flatten 96x16 split 48+48"
    assert kinds["attn.v.weight"] == "convolution: flatten 32x32"
    assert kinds["attn.k.factor"] == "convolution: flatten 16x15"
    groups = kernel.groups_for(attention({"q": nn.Conv2d(32, 32, 1)}))  # as in the autoencoder of Janus
    assert chosen(groups)["attn.q.weight"] == "convolution: flatten 32x32" and not groups.choices.notes


class GLUMBConv(nn.Module):
    """As Sana's: a convolution of each channel alone is between the gates and the layer that reads their product."""

    def __init__(self):
        super().__init__()
        self.conv_inverted = nn.Conv2d(16, 48, 1)
        self.conv_depth = nn.Conv2d(48, 48, 3, groups=48)
        self.conv_point = nn.Conv2d(24, 16, 1)


class GLUMBConvTemp(nn.Module):
    """As Sana's with a time, whose gates are in layers of another class."""

    def __init__(self):
        super().__init__()
        self.t_conv = nn.Conv2d(16, 16, (3, 1))


class MoshiGatingMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 48), nn.Linear(24, 16)


class MoonshineDecoderMLP(MoshiGatingMLP):
    pass


# By hand: modules and their layers that write a gate.
GATED = {
    "Sana's": (GLUMBConv(), "conv_inverted"),
    "Granite Speech's": (
        Model(up_conv=nn.Conv1d(16, 48, 1), glu=nn.GLU(dim=1), down_conv=nn.Conv1d(24, 16, 1)), "up_conv",
    ),
    "a Conformer's": (
        Model(pointwise_conv1=nn.Conv1d(16, 32, 1), depthwise=nn.Conv1d(16, 16, 3, groups=16)), "pointwise_conv1",
    ),
    "a Conformer's of linear layers, as Granite Speech 5's": (
        Model(pointwise_lin1=nn.Linear(16, 48), pointwise_lin2=nn.Linear(24, 16)), "pointwise_lin1",
    ),
    "Flux 2's": (Model(linear_in=nn.Linear(16, 48), act=nn.GLU(), linear_out=nn.Linear(24, 16)), "linear_in"),
    "Moshi's": (MoshiGatingMLP(), "fc1"),
    "Moonshine's": (MoonshineDecoderMLP(), "fc1"),
    "a sequence": (nn.Sequential(nn.Conv1d(16, 48, 1), nn.GLU(dim=1), nn.Conv1d(24, 16, 1)), "0"),
}  # fmt: skip


@pytest.mark.parametrize("case", GATED)
def test_layers_that_write_a_gate_are_cut(kernel, case):
    module, name = GATED[case]
    model, weight = nn.ModuleDict({"block": module}), module.get_submodule(name).weight
    rows = len(weight)
    role, _, parts = reasons(kernel, model)[name].rpartition(": ")
    assert role == "gate and up" and parts.removeprefix("flatten ") == f"{rows}x16 split {rows // 2}+{rows // 2}"
    whole = f"gate and up: flatten {rows}x16" if weight.ndim > 2 else "gate and up"
    assert reasons(kernel, model, gate_up=False)[name] == whole


class GLUEPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(16, 16)


class Conv1D(nn.Conv1d):
    """A convolution, and not the layer of transformers that is called so."""


PLAIN = {
    "beside a layer that reads all": Model(
        act=nn.GLU(dim=1), down=nn.Conv2d(32, 64, 3), skip=nn.Conv2d(32, 32, 1), mid=nn.Conv2d(64, 64, 3)
    ),
    "of a benchmark": GLUEPooler(),
    "of another Conv1D": Conv1D(16, 24, 3),
    "narrowing": Model(a=nn.Conv2d(16, 48, 1), b=nn.Conv2d(24, 16, 1)),
    "a plain pointwise one": Model(pointwise_conv1=nn.Conv1d(16, 32, 1), depthwise=nn.Conv1d(32, 32, 3, groups=32)),
    "of a gated class": GLUMBConvTemp(),
    "a GLU elsewhere": Model(a=nn.Conv2d(16, 32, 1), b=nn.Conv2d(32, 32, 1), glu=nn.GLU(dim=1)),
}


@pytest.mark.parametrize("case", PLAIN)
def test_other_layers_are_neither_cut_nor_remarked(kernel, case):
    groups = kernel.groups_for(nn.ModuleDict({"block": PLAIN[case]}))
    assert not groups.choices.notes and not any("split_rows" in group for group in groups)


def test_a_gated_layer_beside_another_is_no_activation(kernel):
    """A feed-forward layer, as of diffusers, whose weights are inside."""
    gated = type("GEGLU", (nn.Module,), {})
    layer = gated()
    layer.proj = nn.Linear(32, 64)
    model = nn.ModuleDict({"block": Model(a=nn.Linear(32, 64), b=nn.Linear(32, 32), layer=layer)})
    kinds = reasons(kernel, model)
    assert kinds["a"] == "matrix" and kinds["layer.proj"].startswith("gate and up")
