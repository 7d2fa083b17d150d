"""Which layers are taken for outputs, or for hidden ones in spite of their names, by what other layers read."""

import pytest
import torch
from torch import nn

from tests.wrappers.test_model_heads import LAST, Model, linear, not_hidden, sequence


def branch(*sizes):
    return nn.Sequential(*sequence(*sizes), nn.ReLU())


def adapted(layer, inputs=None, outputs=None):
    """As PEFT's LoRA does it."""
    factors = {"lora_A": linear(4, inputs or layer.in_features), "lora_B": linear(outputs or layer.out_features, 4)}
    lists = {name: nn.ModuleDict({"default": factor}) for name, factor in factors.items()}
    return Model(base_layer=layer.requires_grad_(False), **lists)


def trained_whole(layer):
    """As PEFT does it with what `modules_to_save` names."""
    copy = linear(layer.out_features, layer.in_features)
    return Model(original_module=layer.requires_grad_(False), modules_to_save=nn.ModuleDict({"default": copy}))


class Scaled(Model):
    """Modules, and a parameter beside them."""

    def __init__(self, **modules):
        super().__init__(**modules)
        self.scale = nn.Parameter(torch.zeros(16))


BLOCK = Model(attn=linear(16, 16), mlp=sequence(16, 32, 16))

# By hand: what of each model is no hidden matrix.
MODELS = {
    "convolutions of size 1, as PointNet": (
        Model(c1=nn.Conv1d(16, 64, 1), c2=nn.Conv1d(64, 128, 1), classes=linear(40, 128)), {"classes.weight": LAST},
    ),
    "fc that another layer reads": (Model(fc=linear(32, 64), fc2=linear(10, 32)), {"fc2.weight": LAST}),
    "linear that a sequence reads": (
        Model(linear=linear(16, 8), rest=sequence(16, 12, 10)), {"rest.2.weight": LAST},
    ),
    "fc that a layer reads, in a wrapper": (
        Model(module=Model(fc=linear(32, 64), fc2=linear(10, 32))), {"module.fc2.weight": LAST},
    ),
    "fc at the end, as ResNet": (Model(up=linear(16, 8), fc=linear(10, 16)), {"fc.weight": "output_head"}),
    "fc that nothing reads": (Model(fc=linear(10, 16), up=linear(16, 8)), {"fc.weight": "output_head"}),
    "a name that only heads have": (Model(lm_head=linear(16, 8), up=linear(4, 16)), {"lm_head.weight": "output_head"}),
    "policy beside a value of one number": (
        Model(body=linear(32, 64), actor=linear(6, 32), value_head=linear(1, 32)),
        {"actor.weight": LAST, "value_head.weight": LAST},
    ),
    "two critics": (
        Model(q1=sequence(16, 32, 8), q2=sequence(16, 32, 8)), {"q1.2.weight": LAST, "q2.2.weight": LAST},
    ),
    "critics in a list": (
        Model(critics=nn.ModuleList([sequence(16, 32, 8), sequence(16, 32, 9)])),
        {"critics.0.2.weight": LAST, "critics.1.2.weight": LAST},
    ),
    "actor before a critic of one number": (
        Model(actor=sequence(16, 32, 32, 6), critic=sequence(16, 32, 32, 1)),
        {"actor.4.weight": LAST, "critic.4.weight": LAST},
    ),
    "sequences of one width": (
        Model(one=sequence(16, 32, 16), two=sequence(16, 32, 16)), {"two.2.weight": LAST},
    ),
    "encoder and decoder": (Model(encode=sequence(20, 32, 8), decode=sequence(8, 32, 20)), {"decode.2.weight": LAST}),
    "branches that end in an activation": (
        Model(left=branch(16, 32, 8), right=branch(16, 32, 8), out=sequence(16, 32, 10)), {"out.2.weight": LAST},
    ),
    "towers whose outputs are read side by side": (
        Model(user=sequence(16, 32, 8), item=sequence(16, 32, 8), top=sequence(16, 32, 10)), {"top.2.weight": LAST},
    ),
    "sequences one after another": (
        nn.Sequential(sequence(8, 16, 4), nn.Flatten(), sequence(8, 16, 10)), {"2.2.weight": LAST},
    ),
    "a value before the layers that it reads": (
        Model(value_head=linear(1, 16), body=sequence(8, 32, 16)), {"value_head.weight": "output_head"},
    ),
    "a convolution of one output before layers of a time": (
        Model(up=nn.Conv2d(16, 32, 3), out=nn.Conv2d(32, 1, 1), time=sequence(8, 32, 32)),
        {"out.weight": "output_head"},
    ),
    "a critic": (sequence(16, 32, 1), {"2.weight": LAST}),
    "a policy of a convolution and a layer, as AlphaZero's": (
        Model(up=nn.Conv2d(8, 64, 3), policy_head=nn.Sequential(nn.Conv2d(64, 32, 1), nn.Flatten(), linear(40, 128))),
        {"policy_head.2.weight": "output_head"},
    ),
    "a hidden layer in a head, with an adapter": (
        Model(up=linear(32, 64), classifier=Model(dense=adapted(linear(64, 32)), out_proj=adapted(linear(10, 64)))),
        {f"classifier.out_proj.{factor}.default.weight": "output_head" for factor in ("lora_A", "lora_B")},
    ),
    "a square head with an adapter": (
        Model(up=linear(32, 64), classifier=adapted(linear(32, 32))),
        {f"classifier.{factor}.default.weight": "output_head" for factor in ("lora_A", "lora_B")},
    ),
    "a last layer that PEFT trains whole": (
        Model(up=linear(32, 16), down=trained_whole(linear(10, 32))), {"down.modules_to_save.default.weight": LAST},
    ),
    "a last layer with two adapters, one around the other": (
        Model(up=linear(32, 16), down=adapted(Model(base_layer=linear(10, 32)), 32, 10)),
        {"down.lora_A.default.weight": LAST, "down.lora_B.default.weight": LAST},
    ),
    "a block with parameters around it": (Scaled(block=Model(attn=linear(16, 16), mlp=linear(16, 16))), {}),
    "a square head beside another": (
        Model(body=linear(16, 24), policy_head=linear(16, 16), value_head=linear(4, 16)),
        {"policy_head.weight": "output_head", "value_head.weight": "output_head"},
    ),
    "a head by any name inside of another, before a layer": (
        Model(body=linear(16, 24), classifier=Model(lm_head=linear(16, 16), out=linear(4, 16))),
        {"classifier.lm_head.weight": "output_head", "classifier.out.weight": "output_head"},
    ),
    "fc that writes what the first layer reads": (
        Model(up=linear(16, 10), fc=linear(10, 16)), {"fc.weight": "output_head"},
    ),
    "a sequence with a gate": (
        nn.Sequential(linear(16, 8), nn.ReLU(), linear(32, 16), nn.GLU(), linear(10, 16)), {"4.weight": LAST},
    ),
    "critics whose ends are sequences": (
        Model(q1=nn.Sequential(branch(16, 32), sequence(32, 8)), q2=nn.Sequential(branch(16, 32), sequence(32, 8))),
        {"q1.1.0.weight": LAST, "q2.1.0.weight": LAST},
    ),
    "sequences with other inputs": (
        Model(one=sequence(12, 24, 8), two=sequence(16, 32, 10)), {"two.2.weight": LAST},
    ),
    "a sequence of other layers": (
        Model(one=nn.Sequential(linear(32, 16), nn.LayerNorm(32), linear(8, 32)), two=sequence(16, 32, 8)),
        {"two.2.weight": LAST},
    ),
    "a block before two sequences with its inputs": (
        Model(one=sequence(16, 32, 16), two=sequence(16, 32, 8), three=sequence(16, 32, 10)),
        {"two.2.weight": LAST, "three.2.weight": LAST},
    ),
    "a head that ends in a norm": (
        Model(
            up=nn.Conv2d(8, 64, 3),
            policy_head=nn.Sequential(nn.Conv2d(64, 32, 1), nn.Flatten(), linear(40, 128), nn.LayerNorm(40)),
        ),
        {"policy_head.2.weight": "output_head"},
    ),
    "a norm before the only matrix": (nn.Sequential(nn.LayerNorm(16), linear(10, 16)), {}),
    "one block of a network, as a stage of a pipeline": (Model(layers=nn.ModuleDict({"7": BLOCK})), {}),
    "one block in a list": (Model(layers=nn.ModuleList([BLOCK])), {}),
    "one sequence in a list": (Model(layers=nn.ModuleList([sequence(16, 32, 16)])), {}),
    "one network in a list, as TorchRL's": (
        Model(module=nn.ModuleList([Model(module=sequence(16, 32, 8)), nn.Identity()])),
        {"module.0.module.2.weight": LAST},
    ),
    "a network in a network": (
        Model(net=Model(up=linear(32, 16), mlp=sequence(32, 64, 8))), {"net.mlp.2.weight": LAST},
    ),
    "adapters of a hidden fc and of a head": (
        Model(fc=adapted(linear(32, 64)), fc2=adapted(linear(10, 32))),
        {"fc2.lora_A.default.weight": LAST, "fc2.lora_B.default.weight": LAST},
    ),
    "a layer inside a head that another head reads, as ModernBERT": (
        Model(body=linear(16, 24), head=Model(dense=linear(16, 16)), classifier=linear(10, 16)),
        {"classifier.weight": "output_head"},
    ),
    "a layer inside a head that no other head reads": (
        Model(body=linear(16, 24), head=Model(dense=linear(16, 16)), classifier=linear(10, 24)),
        {"head.dense.weight": "output_head", "classifier.weight": "output_head"},
    ),
    "a sequence that is a head by name": (
        Model(body=linear(16, 24), policy_head=sequence(16, 32, 6)), {"policy_head.2.weight": "output_head"},
    ),
    "a convolution that is a head by name, as in segmentation_models_pytorch": (
        Model(body=nn.Conv2d(8, 16, 3), segmentation_head=nn.Sequential(nn.Conv2d(16, 21, 3))),
        {"segmentation_head.0.weight": "output_head"},
    ),
    "a larger part that is called a head": (
        Model(body=linear(16, 24), action_head=Model(up=linear(32, 16), down=linear(16, 32)), out=linear(6, 16)),
        {"out.weight": "output_head"},
    ),
    "convolutions, and nothing linear": (Model(up=linear(16, 8), rest=nn.Sequential(nn.Conv1d(8, 8, 3))), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_heads_follow_from_what_layers_read(kernel, case):
    model, expected = MODELS[case]
    assert not_hidden(kernel, model) == expected
    vectors = (row.shape for row in kernel.groups_for(model).choices.rows if row.reason == "vector")
    assert all(min(shape[:2]) == 1 or len(shape) == 1 for shape in vectors)


class Told(Model):
    """As timm's MetaFormer, whose classifier has a hidden layer."""

    def get_classifier(self):
        return self.head


def test_a_head_that_a_model_tells_may_have_hidden_layers(kernel):
    model = Told(body=linear(16, 24), head=Model(fc1=linear(64, 16), fc2=linear(10, 64)))
    assert not_hidden(kernel, model) == {"head.fc2.weight": "output_head"}


class ToldInside(Model):
    """Tells the layer inside a part that is a head by name."""

    def get_classifier(self):
        return self.head.fc


def test_a_square_output_inside_a_head_does_not_feed_itself(kernel):
    model = ToldInside(body=linear(16, 24), head=Model(fc=linear(16, 16)))
    assert not_hidden(kernel, model) == {"head.fc.weight": "output_head"}


class Raising(Model):
    """A model with properties that raise, as one that waits for its trainer."""

    @property
    def config(self):
        raise RuntimeError("not attached")

    module = base_layer = base_model = num_experts = config


class Wrapper(Model):
    """It has its layer under another name than wrappers do, and theirs as a property."""

    @property
    def module(self):
        return self.inner


def test_a_wrapper_may_hold_a_single_layer(kernel):
    (row,) = kernel.groups_for(Wrapper(inner=linear(16, 8))).choices.rows
    assert row.branch == "muon"


def test_properties_that_raise_tell_nothing(kernel):
    attention = Raising(qkv=linear(96, 32))
    attention.num_heads, attention.head_dim = 4, 8
    rows = kernel.groups_for(Raising(attn=attention, up=linear(8, 32))).choices.rows
    assert [(row.reason, row.matrices) for row in rows] == [
        ("queries, keys and values: 96x32 split 12*8", 12),
        (LAST, 0),
    ]
