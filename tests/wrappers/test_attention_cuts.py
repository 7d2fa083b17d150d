"""How attentions are cut whose head size is not stated: by the number of heads and the rows, or not at all.

Attributes and shapes are those of real classes, made small.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from tests.support.model_of_many_kinds import Conv1D, chosen


def attention(shapes, **attributes):
    """A model whose only attention has these attributes and layers; shapes are (out, in)."""
    inside = nn.Module()
    for key, value in attributes.items():
        setattr(inside, key, value)
    for name, (outputs, inputs) in shapes.items():
        inside.add_module(name, nn.Linear(inputs, outputs, bias=False))
    return nn.ModuleDict({"attn": inside})


def cuts(kernel, model, **options):
    """What follows the roles, by layer."""
    reasons = chosen(kernel.groups_for(model, **options))
    return {name.split(".")[1]: reason.partition(": ")[2] for name, reason in reasons.items()}


def three(*rows, columns=32):
    return {name: (n, columns) for name, n in zip(("q_proj", "k_proj", "v_proj"), rows)}


# By hand: layers, attributes, and what each weight is by head.
BY_HEAD = {
    "output wider than input, as SAM 2": (
        {"qkv": (192, 32)}, dict(dim=32, dim_out=64, num_heads=4), {"qkv": "192x32 split 12*16"},
    ),
    "heads narrower than the model, as SAM": (
        three(16, 16, 16), dict(hidden_size=32, num_attention_heads=4),
        {"q_proj": "16x32 split 4*4", "k_proj": "16x32 split 4*4", "v_proj": "16x32 split 4*4"},
    ),
    "grouped queries without a number of key heads": (
        three(32, 16, 16), dict(hidden_size=32, num_heads=4),
        {"q_proj": "32x32 split 4*8", "k_proj": "16x32 split 8+8", "v_proj": "16x32 split 8+8"},
    ),
    "values with a size of their own, as MiMo-V2": (
        three(32, 16, 32), dict(head_dim=8, v_head_dim=16),
        {"q_proj": "32x32 split 4*8", "k_proj": "16x32 split 8+8", "v_proj": "32x32 split 16+16"},
    ),
    "linear attention, as OlmoHybrid": (
        three(24, 24, 48), dict(head_k_dim=6, head_v_dim=12, num_k_heads=4, hidden_size=32),
        {"q_proj": "24x32 split 4*6", "k_proj": "24x32 split 4*6", "v_proj": "48x32 split 4*12"},
    ),
    "values of another size that only rows show": (
        three(32, 32, 64), dict(num_heads=4),
        {"q_proj": "32x32 split 4*8", "k_proj": "32x32 split 4*8", "v_proj": "64x32 split 4*16"},
    ),
    "groups of queries with their key and value, as torchtitan": (
        {"wqkv": (48, 32)}, dict(head_dim=8, heads_per_kv=4), {"wqkv": "48x32 split 6*8"},
    ),
    "only the number of heads, as CaiT": ({"qkv": (96, 32)}, dict(num_heads=4), {"qkv": "96x32 split 12*8"}),
    "fused grouped queries": (
        {"qkv": (32, 24)}, dict(num_heads=4, num_kv_heads=2), {"qkv": "32x24 split 8*4"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HEAD)
def test_heads_follow_from_their_number_and_the_rows(kernel, case):
    """Whatever a config outside says of other attentions."""
    shapes, attributes, expected = BY_HEAD[case]
    model = attention(shapes, **attributes)
    assert cuts(kernel, model) == expected
    assert cuts(kernel, model, config=SimpleNamespace(head_dim=2, num_heads=16, num_kv_heads=1)) == expected


def without_a_name(shapes, **attributes):
    """The same in a module that neither its name nor its class calls an attention."""
    return nn.ModuleDict({"mixer": attention(shapes, **attributes)["attn"]})


@pytest.mark.parametrize("case", BY_HEAD)
def test_an_attention_need_not_be_called_so(kernel, case):
    """If it states its heads and has queries and keys, or a weight of queries, keys and values."""
    shapes, attributes, expected = BY_HEAD[case]
    model = without_a_name(shapes, **attributes)
    states_heads = {"num_heads", "head_dim", "num_attention_heads"} & attributes.keys()
    assert cuts(kernel, model) == (expected if states_heads or "qkv" in shapes else dict.fromkeys(shapes, ""))


def test_keys_and_values_without_heads_or_queries_are_no_attention(kernel):
    assert cuts(kernel, without_a_name(three(32, 32, 32))) == dict.fromkeys(("q_proj", "k_proj", "v_proj"), "")
    memory = {name: (32, 32) for name in ("key", "value")}
    assert cuts(kernel, without_a_name(memory, num_heads=4)) == {"key": "", "value": ""}


def test_an_attention_inside_does_not_make_attentions_of_what_is_beside_it(kernel):
    model = attention(three(32, 32, 32), num_heads=4)
    model["value"], model["out"] = nn.Linear(32, 64, bias=False), nn.LayerNorm(32)
    model.num_heads = 4
    assert cuts(kernel, nn.ModuleDict({"block": model}))["value"] == ""
    assert kernel.groups_for(model)[0]["split_rows"] == (8,) * 4


def test_a_fused_weight_that_is_not_cut_is_told_whatever_its_module_is_called(kernel):
    groups = kernel.groups_for(without_a_name({"qkv": (96, 32)}))
    assert any("mixer.qkv.weight" in line and "no head size is known" in line for line in groups.choices.notes)


def test_numbers_of_numpy_are_sizes(kernel):
    model = attention({"qkv": (96, 32)}, num_heads=np.int64(4), head_dim=np.int32(8))
    assert cuts(kernel, model) == {"qkv": "96x32 split 12*8"}
    assert cuts(kernel, attention({"qkv": (96, 32)}), config={"head_dim": np.int64(8)}) == {"qkv": "96x32 split 12*8"}


# By hand: fused weights (out, in), attributes, and their parts if heads stay together; "" for one part.
WHOLE = {
    "output wider than input, as SAM 2": ((192, 32), dict(dim=32, dim_out=64, num_heads=4), "192x32 split 64+64+64"),
    "only the number of heads": ((96, 32), dict(num_heads=4), "96x32 split 32+32+32"),
    "a known number of key heads": ((64, 32), dict(head_dim=8, num_heads=4, num_kv_heads=2), "64x32 split 32+16+16"),
    "a known size of heads": ((48, 32), dict(head_dim=8, num_heads=4), "48x32 split 32+8+8"),
    "keys and values alone, as GCViT": ((64, 32), dict(head_dim=8, num_heads=4), ""),
    "keys and values alone, without a size": ((64, 32), dict(dim=32, num_heads=4), ""),
    "keys or a narrow attention": ((48, 32), dict(dim=32, num_heads=4), ""),
    "another number of key heads": ((48, 32), dict(head_dim=8, num_heads=4, num_kv_heads=2), ""),
    "each head's rows together, as EfficientFormer": (
        (192, 64), dict(num_heads=4, key_dim=8, val_dim=32), "192x64 split 4*(8+8+32)",
    ),
    "each head's rows together, but not these": ((50, 64), dict(num_heads=4, key_dim=8, val_dim=32), ""),
    "each head's rows together, as TinyViT": ((96, 32), dict(num_heads=4, key_dim=8, val_dim=8), "96x32 split 12*8"),
    "values of another size": ((96, 32), dict(head_dim=8, v_head_dim=16, num_heads=4), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_queries_keys_and_values_are_cut_if_sizes_agree(kernel, case):
    """Otherwise the weight stays whole, and a note says so."""
    shape, attributes, expected = WHOLE[case]
    groups = kernel.groups_for(attention({"qkv": shape}, **attributes), heads=False)
    (reason,) = chosen(groups).values()
    assert reason == "queries, keys and values" + (f": {expected}" if expected else "")
    assert bool(groups.choices.notes) == (not expected)


@pytest.mark.parametrize("multi_query, expected", [(False, "96x32 split 12*8"), (True, "48x32 split 32+8+8")])
def test_rows_that_lie_by_head_are_not_cut_into_thirds(kernel, multi_query, expected):
    """As in transformers' GPTBigCode; if all heads share one key, queries come first."""

    class GPTBigCodeAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim, self.multi_query = 4, 8, multi_query
            self.c_attn = nn.Linear(32, 48 if multi_query else 96, bias=False)

    assert cuts(kernel, nn.ModuleDict({"attn": GPTBigCodeAttention()}), heads=False) == {"c_attn": expected}


@pytest.mark.parametrize("heads", [True, False])
def test_latent_attention_is_cut_by_its_three_sizes(kernel, heads):
    """As DeepSeek's: the rotary key, which all heads share, comes last, and a head has its keys before its values."""
    sizes = dict(qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16)
    model = attention({"q_b_proj": (80, 36), "kv_a_proj_with_mqa": (28, 48), "kv_b_proj": (112, 20)}, **sizes)
    by_head = {"q_b_proj": "80x36 split 4*20", "kv_b_proj": "112x20 split 4*(12+16)"}
    whole = dict.fromkeys(by_head, "")
    expected = {"kv_a_proj_with_mqa": "28x48 split 20+8", **(by_head if heads else whole)}
    assert cuts(kernel, model, heads=heads) == expected


def test_an_attention_may_say_that_rows_lie_by_head(kernel):
    """As timm's MaxViT does, of which the others have all queries first."""
    model = attention({"qkv": (96, 32)}, dim_head=8, num_heads=4, head_first=True)
    assert cuts(kernel, model, heads=False) == {"qkv": "96x32 split 12*8"}
    model = attention({"qkv": (96, 32)}, dim_head=8, num_heads=4, head_first=False)
    assert cuts(kernel, model, heads=False) == {"qkv": "96x32 split 32+32+32"}


def test_queries_beside_a_fused_weight_are_not_in_it(kernel):
    """As in GPT-2's cross attention."""
    inside = nn.ModuleDict({"c_attn": Conv1D(64, 32), "q_attn": Conv1D(32, 32)})
    inside.head_dim, inside.num_heads = 8, 4
    fused = cuts(kernel, nn.ModuleDict({"crossattention": inside}), heads=False)["c_attn"]
    assert fused == "64x32 transposed split 32+32"


@pytest.mark.parametrize("heads", [True, False])
def test_fused_weights_whose_names_do_not_tell_the_order_of_rows_are_cut_by_head(kernel, heads):
    """Qwen3-Next has `in_proj_qkvz` by head and Qwen3.5 `in_proj_qkv` in three parts: heads are together in both."""
    delta = attention({"in_proj_qkvz": (96, 32), "in_proj_ba": (8, 32)}, head_k_dim=8, head_v_dim=8)
    assert cuts(kernel, delta, heads=heads) == {"in_proj_qkvz": "96x32 split 12*8", "in_proj_ba": ""}
    pooled = attention({"q": (32, 32), "kv": (64, 32)}, num_heads=4, dim=32)
    assert cuts(kernel, pooled, heads=heads)["kv"] == "64x32 split 8*8"


@pytest.mark.parametrize("value, by_head", [(8, "4*8"), (16, "16+16")])
def test_gates_of_values_are_cut_by_the_heads_of_values(kernel, value, by_head):
    """Qwen3.5's, which are cut by head in Qwen3-Next's `in_proj_qkvz`, too. One row of a head is no matrix."""
    shapes = {"in_proj_z": (32, 32), "in_proj_b": (8, 32), "in_proj_a": (8, 32)}
    delta = attention(shapes, head_k_dim=8, head_v_dim=value)
    whole = dict.fromkeys(shapes, "")
    assert cuts(kernel, delta) == {**whole, "in_proj_z": f"32x32 split {by_head}"}
    assert cuts(kernel, delta, heads=False) == whole


@pytest.mark.parametrize(
    "model",
    [
        nn.ModuleDict({"attn": nn.MultiheadAttention(16, 8, bias=False)}),
        attention({"q_proj": (16, 16)}, head_dim=2),
        attention({"kv_b_proj": (40, 16)}, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=2),
    ],
    ids=["torch's", "queries", "latent"],
)
def test_heads_of_fewer_rows_than_a_matrix_needs_are_not_cut_apart(kernel, model):
    """A matrix with so short a side would go to AdamW, so the weight stays whole, and a remark says so."""
    groups = kernel.groups_for(model)
    assert not any("split" in reason for reason in chosen(groups).values())
    (note,) = groups.choices.notes
    assert "are not cut, because heads of 2 rows are less than the 4 rows of a matrix" in note


def test_such_weights_stay_whole_if_values_have_a_size_of_their_own(kernel):
    groups = kernel.groups_for(attention({"in_proj_qkvz": (96, 32)}, head_k_dim=8, head_v_dim=16))
    assert chosen(groups) == {"attn.in_proj_qkvz.weight": "queries, keys and values"}
    (note,) = groups.choices.notes
    assert "heads of values have a size of their own" in note


def test_a_number_of_heads_from_outside_counts_only_for_attentions_as_wide_as_the_model(kernel):
    model = nn.ModuleDict({"wide": attention(three(32, 16, 32)), "narrow": attention(three(16, 16, 16))})
    groups = kernel.groups_for(model, config=SimpleNamespace(hidden_size=32, num_attention_heads=4))
    assert chosen(groups) == {
        "wide.attn.q_proj.weight": "queries: 32x32 split 4*8",
        "wide.attn.k_proj.weight": "keys: 16x32 split 8+8",
        "wide.attn.v_proj.weight": "values: 32x32 split 16+16",
        "narrow.attn.q_proj.weight": "queries",
        "narrow.attn.k_proj.weight": "keys",
        "narrow.attn.v_proj.weight": "values",
    }
    assert len(groups.choices.notes) == 3 and all("are not cut, because sizes" in note for note in groups.choices.notes)


class PerLayer:
    """As a config of transformers in which layers differ."""

    num_attention_heads = 4

    @property
    def num_key_value_heads(self):
        raise RuntimeError("it varies across layers")


def test_a_config_may_refuse_a_size(kernel):
    model = attention({"q_proj": (32, 32)}, head_dim=8, config=PerLayer())
    assert cuts(kernel, model) == {"q_proj": "32x32 split 4*8"}
