"""Names of norms, and of layers that begin with a norm."""

from __future__ import annotations

import pytest
import torch

# Components of names, of transformers, timm, diffusers, torchtitan and Transformer Engine.
NORMS = (
    "norm", "norm1", "norm_1", "ln_1", "ln", "ln_f", "bn", "bn2", "attention_norm", "ffn_norm", "mlp_norm", "conv_norm",
    "q_norm", "k_norm", "norm_q", "norm_k", "norm_qk", "norm_kv", "kv_a_layernorm", "query_layernorm", "query_norm",
    "proj_norm", "input_layernorm", "post_attention_layernorm", "attn_layer_norm", "self_attn_layer_norm", "dense_norm",
    "final_layer_norm", "norm_attn_norm", "layer_norm_weight", "group_norm", "norm2d", "norm_out", "norm1_context",
)  # fmt: skip
# Transformer Engine's LayerNormLinear and LayerNormMLP, by the names that its layers and Megatron give them.
LAYERS = {
    "layers.0.self_attention.layernorm_qkv.weight": (192, 64),
    "layers.0.self_attention.layernorm_qkv.query_weight": (64, 64),
    "layers.0.inter_attention.layernorm_query.weight": (64, 64),
    "layers.0.layernorm_mlp.fc1_weight": (256, 64),
    "layers.0.layernorm_mlp.fc2_weight": (64, 256),
    "layers.0.norm_linear.weight": (64, 64),
}


def route(kernel, name, shape):
    (row,) = kernel.route([(name, torch.nn.Parameter(torch.zeros(shape)))]).rows
    return row.branch, row.reason


@pytest.mark.parametrize("component", NORMS)
@pytest.mark.parametrize("name", ["layers.0.{}.weight", "layers.0.layernorm_qkv.{}", "{}.weight", "layers.0.{}.0"])
def test_norms_of_two_dimensions_go_to_adamw(kernel, component, name):
    """Also those inside a layer that begins with a norm."""
    assert route(kernel, name.format(component), (8, 64)) == ("adamw", f"norm:{component}")


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_begin_with_a_norm_are_hidden_matrices(kernel, name):
    assert route(kernel, name, LAYERS[name]) == ("muon", "matrix")


def test_the_norm_inside_such_a_layer_is_a_vector(kernel):
    assert route(kernel, "layers.0.layernorm_mlp.layer_norm_weight", (64,)) == ("adamw", "insufficient_dims")
