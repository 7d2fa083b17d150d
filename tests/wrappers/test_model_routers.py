"""What modules say of gates: those beside experts are routers, those beside a layer of their sizes are hidden."""

import torch
from torch import nn

from tests.support.model_of_many_kinds import chosen
from tests.wrappers.test_guessed_heads import adapted
from tests.wrappers.test_model_heads import Model, linear


def gated(inputs, hidden, first="gate"):
    """As SwiGLU's three layers."""
    layers = {first: linear(hidden, inputs), "up": linear(hidden, inputs), "down": linear(inputs, hidden)}
    return Model(**layers)


def experts(count, *sizes):
    return nn.ModuleList([gated(*sizes) for _ in range(count)])


def reasons(kernel, feed_forward):
    """By the names within the second of two blocks of a model with a head."""
    blocks = nn.ModuleList([Model(up=linear(64, 64)), Model(mlp=feed_forward)])
    kinds = chosen(kernel.groups_for(Model(blocks=blocks, lm_head=linear(96, 64))))
    return {name.removeprefix("blocks.1.mlp."): reason for name, reason in kinds.items() if name.startswith("blocks.1")}


def test_a_mixture_of_experts_has_one_router(kernel):
    """And its experts' gates are hidden."""
    kinds = reasons(kernel, Model(gate=linear(4, 64), experts=experts(4, 64, 32), shared_expert=gated(64, 32)))
    assert kinds.pop("gate.weight") == "router" and set(kinds.values()) == {"matrix"}


def test_a_gate_beside_experts_is_a_router_of_any_shape(kernel):
    """Also inside a module of that name, as DeepSpeed's; names alone would not show it."""
    for gate in (linear(64, 64), Model(wg=linear(64, 64))):
        kinds = reasons(kernel, Model(gate=gate, experts=experts(2, 64, 32)))
        assert {reason for name, reason in kinds.items() if name.startswith("gate.")} == {"router"}
    stack = Model(gate=linear(64, 64))
    stack.experts_up = nn.Parameter(torch.zeros(64, 32, 64))
    assert reasons(kernel, stack)["gate.weight"] == "router"


def test_a_gate_beside_a_layer_of_its_sizes_is_hidden(kernel):
    """Though it is as narrow as a router, which nothing resembles; so are the factors of its adapter."""
    assert set(reasons(kernel, gated(64, 8)).values()) == {"matrix"}
    assert reasons(kernel, Model(gate=linear(8, 64), up=linear(32, 64)))["gate.weight"] == "router"
    kinds = reasons(kernel, Model(gate=adapted(linear(8, 64)), up=linear(8, 64)))
    assert kinds == {
        "gate.lora_A.default.weight": "lora:a",
        "gate.lora_B.default.weight": "lora:b",
        "up.weight": "matrix",
    }


def test_what_is_called_router_is_one_whatever_is_beside_it(kernel):
    """As beside the noise of its logits, or beside a second router."""
    for layers in ({"router": linear(8, 64), "noise": linear(8, 64)}, {"router": gated(64, 8)}):
        kinds = reasons(kernel, Model(**layers, up=linear(32, 64)))
        assert {reason.split(":")[0] for name, reason in kinds.items() if name.startswith("router")} == {"router"}


def test_a_gated_layer_beside_a_single_expert_has_no_router(kernel):
    layers = dict(gate=linear(128, 64), up=linear(128, 64), down=linear(64, 128), shared_expert=gated(64, 32))
    assert set(reasons(kernel, Model(**layers)).values()) == {"matrix"}


def test_hidden_layers_of_blocks_with_names_of_heads_do_not_hide_the_head(kernel):
    """It is told by its name, or guessed, as it would be without them."""
    blocks = nn.ModuleList([Model(attn=Model(output_projection=linear(64, 64))) for _ in range(2)])
    kinds = chosen(kernel.groups_for(Model(blocks=blocks, words=linear(96, 64))))
    assert kinds.pop("words.weight") == "output_head:last_linear" and set(kinds.values()) == {"matrix"}
