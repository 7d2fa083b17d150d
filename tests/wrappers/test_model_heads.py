"""Which layers of a model are its outputs and its tables, by what its modules tell."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.model_of_many_kinds import chosen

LAST = "output_head:last_linear"


def linear(outputs, inputs):
    return nn.Linear(inputs, outputs, bias=False)


class Model(nn.Module):
    """A model with these modules; dots lead into modules that hold others."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def matrices(kernel, model):
    """The reasons of all that is no vector."""
    return {name: reason for name, reason in chosen(kernel.groups_for(model)).items() if reason != "vector"}


def not_hidden(kernel, model):
    """The reasons of all that AdamW gets and that is no vector."""
    rows = kernel.groups_for(model).choices.rows
    return {row.name: row.reason for row in rows if row.branch != "muon" and row.reason != "vector"}


def sequence(*sizes):
    """A multilayer perceptron."""
    layers = [layer for sizes in zip(sizes[1:], sizes) for layer in (linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def lenet():
    """PyTorch's tutorial."""
    return Model(
        conv1=nn.Conv2d(4, 6, 5), conv2=nn.Conv2d(6, 16, 5), fc1=linear(120, 400), fc2=linear(84, 120),
        fc3=linear(10, 84),
    )  # fmt: skip


def vgg():
    """torchvision's."""
    return Model(features=nn.Sequential(nn.Conv2d(4, 8, 3)), classifier=sequence(32, 24, 24, 10))


# By hand: what of each model is no hidden matrix.
NETWORKS = {
    "sequence": (sequence(8, 16, 16, 10), {"4.weight": LAST}),
    "nested": (nn.Sequential(sequence(8, 16), nn.Sequential(nn.ReLU(), linear(10, 16))), {"1.1.weight": LAST}),
    "sequence in a model": (Model(layers=sequence(8, 16, 10)), {"layers.2.weight": LAST}),
    "list of layers": (Model(layers=nn.ModuleList([linear(16, 8), linear(10, 16)])), {"layers.1.weight": LAST}),
    "lenet": (lenet(), {"fc3.weight": LAST}),
    "wrapped": (Model(model=lenet()), {"model.fc3.weight": LAST}),
    "compiled": (torch.compile(lenet()), {"_orig_mod.fc3.weight": LAST}),
    "last layer compiled": (
        Model(up=linear(16, 8), down=torch.compile(linear(10, 16))), {"down._orig_mod.weight": LAST},
    ),
    "policy and value, checkpointed": (
        Model(trunk=linear(16, 8), act=checkpoint_wrapper(linear(6, 16)), value=checkpoint_wrapper(linear(4, 16))),
        {"act._checkpoint_wrapped_module.weight": LAST, "value._checkpoint_wrapped_module.weight": LAST},
    ),
    "policy and value": (
        Model(trunk=linear(16, 8), act=linear(6, 16), value=linear(4, 16)),
        {"act.weight": LAST, "value.weight": LAST},
    ),
    "chain of one width": (Model(a=linear(16, 16), b=linear(16, 16), c=linear(16, 16)), {"c.weight": LAST}),
    "vgg": (vgg(), {"classifier.4.weight": "output_head"}),
    "head of convolutions, as DeepLab": (
        Model(
            trunk=nn.Conv2d(8, 8, 3),
            classifier=nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 21, 1)),
        ),
        {"classifier.3.weight": "output_head"},
    ),
    "dense layer of a head, as RoBERTa": (
        Model(up=linear(16, 8), classifier=Model(dense=linear(16, 16), out_proj=linear(4, 16))),
        {"classifier.out_proj.weight": "output_head"},
    ),
    "several heads": (
        Model(up=linear(16, 8), heads=nn.ModuleList([linear(16, 16), linear(16, 16)])),
        {"heads.0.weight": "output_head", "heads.1.weight": "output_head"},
    ),
    "head registered first": (Model(head=linear(10, 16), up=linear(16, 8)), {"head.weight": "output_head"}),
    "head beside one told by its name": (
        Model(up=linear(16, 8), cls_head=linear(10, 16), other=linear(7, 16)), {"cls_head.weight": "output_head"},
    ),
    "norm comes last": (nn.Sequential(linear(16, 8), linear(10, 16), nn.LayerNorm(10)), {}),
    "block": (Model(up=linear(16, 8), down=linear(8, 16), norm=nn.LayerNorm(8)), {}),
    "single layer": (nn.Sequential(linear(16, 8)), {}),
    "layer of torch's": (nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), {}),
    "attention of torch's": (nn.MultiheadAttention(8, 2), {}),
    "container that tells no order": (nn.ModuleDict({"a": linear(16, 8), "b": linear(8, 16)}), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", NETWORKS)
def test_the_last_linear_layer_of_a_network_is_its_head(kernel, case):
    """And nothing else is no hidden matrix."""
    model, expected = NETWORKS[case]
    assert not_hidden(kernel, model) == expected
    rows = kernel.groups_for(model).choices.rows
    assert all(row.reason == "vector" for row in rows if len(row.shape) < 2)


def test_the_optimizer_says_which_head_was_guessed(kernel):
    optimizer = kernel.Muon(kernel.groups_for(sequence(8, 16, 10)))
    assert [(row.name, row.branch, row.reason) for row in optimizer.explain().rows] == [
        ("0.weight", "muon", "matrix"), ("2.weight", "adamw", LAST),
    ]  # fmt: skip


def test_a_pattern_keeps_a_guessed_head(kernel):
    groups = kernel.groups_for(sequence(8, 16, 10), patterns={"2.weight": {"use_muon": True}})
    assert {row.branch for row in groups.choices.rows} == {"muon"}


def test_a_model_without_a_head_says_so_as_transformers_models_do(kernel):
    model = lenet()
    model.__dict__["base_model"] = model
    assert matrices(kernel, model)["fc3.weight"] == "matrix"


class Classifier(Model):
    """As timm's models."""

    def get_classifier(self):
        return self.told


def test_a_model_inside_another_tells_its_head(kernel):
    told = Classifier(words=linear(10, 16), up=linear(16, 16))
    told.told = told.words
    assert matrices(kernel, Model(net=told, loss=linear(16, 16))) == {
        "net.words.weight": "output_head", "net.up.weight": "matrix", "loss.weight": "matrix",
    }  # fmt: skip


def test_a_model_may_tell_several_heads(kernel):
    """As timm's distilled ones: a tuple."""
    model = Classifier(a=linear(10, 16), b=linear(10, 16), up=linear(16, 16))
    model.told = (model.a, model.b)
    kinds = matrices(kernel, model)
    assert kinds == {"a.weight": "output_head", "b.weight": "output_head", "up.weight": "matrix"}


def test_a_head_that_is_told_to_be_nothing_is_none(kernel):
    """As timm's without classes: what else there is decides."""
    model = Classifier(up=linear(16, 8), down=linear(10, 16))
    model.told = nn.Identity()
    assert matrices(kernel, model) == {"up.weight": "matrix", "down.weight": LAST}


class Asking(Model):
    """Wants a name, and refuses for want of a head."""

    error = TypeError

    def get_classifier(self, name):
        return self.down

    def get_output_embeddings(self):
        raise self.error("no head")


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, RuntimeError])
def test_a_method_that_raises_tells_no_head(kernel, error):
    """What else there is decides."""
    model = Asking(up=linear(16, 8), down=linear(10, 16))
    model.error = error
    assert matrices(kernel, model) == {"up.weight": "matrix", "down.weight": LAST}


class Same(nn.Module):
    def forward(self, x):
        return x


class Words(nn.Embedding):
    pass


def test_tables_are_known_by_their_modules(kernel):
    """Whatever they are called, tied, parametrized, or inside an adapter."""
    inside = Model(base_layer=nn.Embedding(40, 24))
    inside.deltas = nn.ParameterDict({"default": torch.zeros(8, 24)})
    model = Model(
        a=nn.Embedding(40, 24), b=Words(40, 24), c=nn.EmbeddingBag(40, 24), d=inside, e=nn.Embedding(40, 24),
        f=nn.Sequential(nn.Embedding(40, 24), linear(24, 24)), g=linear(40, 24), h=nn.Embedding(40, 24),
        up=linear(24, 24), norm=nn.LayerNorm(24),
    )  # fmt: skip
    nn.utils.parametrize.register_parametrization(model.e, "weight", Same())
    model.g.weight = model.h.weight
    assert matrices(kernel, model) == {
        **{f"{name}.weight": "embedding" for name in "abcg"},
        "d.base_layer.weight": "embedding",
        "d.deltas.default": "embedding",
        "e.parametrizations.weight.original": "embedding",
        "f.0.weight": "embedding",
        "f.1.weight": "matrix",
        "up.weight": "matrix",
    }


def test_parametrized_layers_are_what_they_were(kernel):
    attention = Model(q_proj=linear(24, 24))
    attention.head_dim = 8
    model = Model(attn=attention, up=linear(24, 24), words=linear(40, 24))
    for layer in (attention.q_proj, model.words):
        nn.utils.parametrizations.weight_norm(layer)
    assert matrices(kernel, model) == {
        "attn.q_proj.parametrizations.weight.original1": "queries: 24x24 split 8+8+8",
        "up.weight": "matrix",
        "words.parametrizations.weight.original1": LAST,
    }


class PatchEmbed(Model):
    pass


def test_patch_embeddings_are_known_by_their_modules(kernel):
    """As timm's class in mixers, `stem`, and in diffusion transformers, `x_embedder`; not between stages."""
    stages = nn.ModuleList([Model(downsample=PatchEmbed(proj=nn.Conv2d(24, 24, 3)))])
    second = PatchEmbed(proj=nn.Conv2d(24, 24, 3))  # as in CoaT
    model = Model(stem=PatchEmbed(proj=nn.Conv2d(4, 24, 4)), stages=stages, patch_embed2=second, norm=nn.LayerNorm(24))
    assert matrices(kernel, model) == {
        "stem.proj.weight": "embedding", "stages.0.downsample.proj.weight": "convolution: flatten 24x216",
        "patch_embed2.proj.weight": "convolution: flatten 24x216",
    }  # fmt: skip


def test_a_head_for_further_tokens_leaves_the_models_head_to_be_found(kernel):
    further = Model(head=linear(32, 100))
    model = Model(tok_emb=nn.Embedding(100, 32), mtp_layers=nn.ModuleList([further]), up=linear(32, 32))
    model.unproject = linear(32, 100)
    reasons = matrices(kernel, model)
    assert reasons.pop("up.weight").startswith("matrix") and reasons.pop("tok_emb.weight") == "embedding"
    assert reasons == {"mtp_layers.0.head.weight": "output_head", "unproject.weight": LAST}


def test_torchs_output_layer_for_many_classes_is_a_head(kernel):
    model = Model(embed=nn.Embedding(100, 32), up=linear(32, 32), out=nn.AdaptiveLogSoftmaxWithLoss(32, 100, [20, 50]))
    reasons = matrices(kernel, model)
    assert reasons.pop("up.weight").startswith("matrix") and reasons.pop("embed.weight") == "embedding"
    assert len(reasons) == 5 and set(reasons.values()) == {"output_head"}
