"""Which of several statements about the sizes of an attention counts, and which numbers are no sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.wrappers.test_attention_cuts import attention, cuts, three

EIGHTS = {"q_proj": "32x32 split 4*8", "k_proj": "32x32 split 4*8", "v_proj": "32x32 split 4*8"}


@pytest.mark.parametrize("head_dim", [-1, 0, True, False, 8.0, None])
def test_what_is_no_whole_number_above_zero_is_no_size(kernel, head_dim):
    """Such as a flag, or what stands for a size that is not set: the next name counts."""
    assert cuts(kernel, attention(three(32, 32, 32), head_dim=head_dim, attention_head_size=8)) == EIGHTS


def test_a_single_head_is_the_whole_matrix(kernel):
    """No part is named, so the group's settings are those of any other matrix."""
    groups = kernel.groups_for(attention(three(32, 32, 32), num_heads=1, head_dim=32))
    assert not any("split_rows" in group for group in groups)


def test_vectors_are_no_weights_of_an_attention(kernel):
    """Even if one has the name of queries, and comes first."""
    model = attention({}, num_heads=4, hidden_size=32)
    model["attn"].register_parameter("q", nn.Parameter(torch.zeros(6)))
    for name, layer in attention(three(32, 32, 32))["attn"].named_children():
        model["attn"].add_module(name, layer)
    assert {name: how for name, how in cuts(kernel, model).items() if name != "q"} == EIGHTS


def test_of_two_weights_of_one_role_the_first_one_counts(kernel):
    """For keys whose heads are as long as those of the queries."""
    shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "wq": (48, 32)}
    assert cuts(kernel, attention(shapes, num_heads=4))["k_proj"] == "16x32 split 8+8"


def test_a_stated_number_of_key_heads_is_enough_for_values(kernel):
    """Where the keys are elsewhere."""
    shapes = {"q_proj": (32, 32), "v_proj": (32, 32)}
    assert cuts(kernel, attention(shapes, num_heads=4, num_kv_heads=2))["v_proj"] == "32x32 split 16+16"


def test_key_heads_may_be_stated_by_the_config_of_what_states_the_heads(kernel):
    model = attention({"qkv": (64, 32)}, num_heads=4, config=SimpleNamespace(num_key_value_heads=2))
    assert cuts(kernel, model) == {"qkv": "64x32 split 8*8"}


def test_key_heads_may_be_stated_beside_the_size_of_a_head_alone(kernel):
    """And the number of heads further out."""
    model, config = attention({"qkv": (64, 32)}, head_dim=8, num_kv_heads=2), SimpleNamespace(num_heads=4)
    assert cuts(kernel, model, config=config, heads=False) == {"qkv": "64x32 split 32+16+16"}


@pytest.mark.parametrize("attributes", [dict(rows=56), dict(rows=80, num_kv_heads=2)], ids=str)
def test_fused_rows_that_are_not_those_of_whole_heads_stay_together(kernel, attributes):
    """With four heads of 8: keys and values of one and a half heads each, or of three where two are stated."""
    rows, stated = attributes["rows"], {key: value for key, value in attributes.items() if key != "rows"}
    assert cuts(kernel, attention({"qkv": (rows, 32)}, head_dim=8, num_heads=4, **stated), heads=False) == {"qkv": ""}


def test_latent_keys_and_values_are_cut_by_latent_sizes_alone(kernel):
    """Their heads have the rows of a key and of a value, which a size of heads does not tell apart."""
    shapes = {"q_proj": (32, 32), "kv_b_proj": (64, 16)}
    assert cuts(kernel, attention(shapes, head_dim=8, num_heads=4))["kv_b_proj"] == ""


def test_a_fused_weight_beside_latent_sizes_is_told_as_uncut(kernel):
    sizes = dict(qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    groups = kernel.groups_for(attention({"qkv": (96, 32)}, **sizes))
    assert any("attn.qkv.weight" in line and "not cut" in line for line in groups.choices.notes)


def test_keys_and_values_of_odd_rows_together_stay_together(kernel):
    """Beside queries of their own a fused weight has two halves, which here would not be whole."""
    shapes = {"q_attn": (32, 32), "c_attn": (33, 32)}
    assert cuts(kernel, attention(shapes, num_heads=4), heads=False) == {"q_attn": "", "c_attn": ""}
