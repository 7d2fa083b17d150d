"""QK-clip scales what is added to queries and keys like their weights: LoRA, and the bias that projections share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.support.small_attention import KINDS, THRESHOLD

HEAD, FACTOR = 4, 0.5  # alpha 0.5 of a logit that is four times the threshold


def clipped(kernel, named: dict[str, Parameter], layer, **clip) -> None:
    """Take a step that only clips."""
    settings = {"head_dim": HEAD, "threshold": 100, **clip}
    optimizer = kernel.Muon(named.items(), lr=0.0, weight_decay=0.0, qk_clip=settings)
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.observe_qk_logits(layer, torch.tensor([400.0, 400.0]))
    optimizer.step()


def adapted(seed: int, weight: str, outer: str) -> dict[str, Parameter]:
    torch.manual_seed(seed)
    shapes = {weight: (8, 8), outer.replace("B", "A"): (4, 8), outer: (8, 4)}
    return {name: Parameter(torch.randn(shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "weight, outer", [("weight", "lora_B"), ("base_layer.weight", "lora_B.default.weight")], ids=["loralib", "PEFT"]
)
def test_an_adapter_that_belongs_to_the_projection_is_scaled_with_it(kernel, weight, outer):
    """Rows of W + B A are those of W and of B; A stays, and so does the adapter of the values."""
    projections = {f"attn.{role}_proj": adapted(seed, weight, outer) for seed, role in enumerate("qkv")}
    named = {f"{module}.{name}": p for module, parts in projections.items() for name, p in parts.items()}

    def effective(parts: dict[str, Parameter]) -> Tensor:
        W, A, B = parts.values()
        return (W + B @ A).detach()

    before = {module: effective(parts) for module, parts in projections.items()}
    clipped(kernel, named, "attn")
    for (module, parts), factor in zip(projections.items(), (FACTOR, FACTOR, 1.0)):
        torch.testing.assert_close(effective(parts), factor * before[module])


def test_a_factor_with_other_rows_than_its_weight_is_refused(kernel):
    """loralib's MergedLinear adapts only some of the fused parts."""
    named = {"attn.qkv.weight": Parameter(torch.ones(24, 8)), "attn.qkv.lora_B": Parameter(torch.ones(16, 4))}
    with pytest.raises(ValueError, match=r"would scale attn\.qkv\.lora_B, which has 16 rows, like a weight of 24"):
        kernel.Muon(named.items(), qk_clip={"head_dim": HEAD})


def test_an_adapter_of_a_longer_name_belongs_to_another_attention(kernel):
    named = {f"attn.{name}.weight": Parameter(torch.ones(8, 8)) for name in ("q_proj", "k_proj")}
    other = named["cross.attn.q_proj.lora_B"] = Parameter(torch.ones(8, 4))
    clipped(kernel, named, "attn")
    assert named["attn.q_proj.weight"].unique().tolist() == [FACTOR] and other.unique().tolist() == [1.0]


def test_two_weights_of_one_role_are_asked_about(kernel):
    named = {f"attn.{name}.weight": Parameter(torch.ones(8, 8)) for name in ("q_proj", "wq", "k_proj")}
    with pytest.raises(ValueError, match=r"takes attn\.q_proj\.weight or attn\.wq\.weight as query: .* `layers`"):
        kernel.Muon(named.items(), qk_clip={"head_dim": HEAD})


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_bias_of_separate_weights_is_scaled_as_far_as_they_reach(kernel, alpha):
    """torch has one bias for the queries, keys and values of an attention with other widths of keys."""
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=4)
    nn.init.ones_(attention.in_proj_bias)
    named = {f"attn.{name}": p for name, p in attention.named_parameters()}
    clipped(kernel, named, 0, layers=[("attn.q_proj_weight", "attn.k_proj_weight")], alpha=alpha)
    gamma = FACTOR**2
    assert attention.in_proj_bias.tolist() == [gamma**alpha] * 8 + [gamma ** (1 - alpha)] * 8 + [1.0] * 8


def test_a_step_that_overflow_skips_scales_neither_biases_nor_frozen_weights(kernel):
    """As a captured step does, which finds that out itself; the next good one scales them."""
    sizes = {"weight": (8, 8), "bias": (8,)}
    named = {f"attn.{name}.{key}": torch.ones(size) for name in ("q_proj", "k_proj") for key, size in sizes.items()}
    named = {name: Parameter(value, requires_grad=name != "attn.k_proj.weight") for name, value in named.items()}
    settings = {"head_dim": HEAD, "threshold": 100}
    optimizer = kernel.Muon(named.items(), lr=0.0, weight_decay=0.0, qk_clip=settings, capturable=True)
    optimizer.observe_qk_logits("attn", torch.tensor([400.0, 400.0]))
    for found_inf, value in ((1.0, 1.0), (0.0, FACTOR)):
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor([found_inf])
        for p in named.values():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
        assert all((p == value).all() for p in named.values())


@pytest.mark.parametrize(
    "beside, message",
    [
        ("q_norm.weight", r"bring down the logits of a\.attn\.q_proj\.weight, because of a\.attn\.q_norm\.weight"),
        ("k_layernorm.weight", "because of a.attn.k_layernorm.weight: leave qk_clip out"),
        ("norm_k.weight", "because of a.attn.norm_k.weight: leave qk_clip out"),
        *(
            (f"{norm}.weight", f"because of a.attn.{norm}.weight: leave qk_clip out")
            for norm in ("ln_q", "k_ln", "query_ln", "layernorm_q", "layer_norm_k", "q_rms", "rms_k", "norm_query")
        ),
        *(
            (f"{norm}.scale", f"because of a.attn.{norm}.scale: leave qk_clip out")
            for norm in ("queries_norm", "q_normalization", "qk_ln", "ln_qk", "key_rms_norm", "img_attn_q_norm")
        ),
        *(
            (f"{norm}.scale", f"because of a.attn.{norm}.scale: leave qk_clip out")
            for norm in ("qk_norm", "norm.query_norm", "qk_norm.k_norm", "norms.q", "norm.k", "core_attention.ln_q")
        ),
        *(
            (f"{norm}.weight", f"because of a.attn.{norm}.weight: leave qk_clip out")
            for norm in ("q_RMSNorm", "queryNorm", "RMSNorm_k", "query_norm_layer", "q_norm1")
        ),
        ("q_norm_weight", "because of a.attn.q_norm_weight: leave qk_clip out"),
        ("bias_k", "because of a.attn.bias_k: leave qk_clip out"),
        ("k_proj.lora_magnitude_vector.default.weight", "default.weight keeps the size of its rows"),
    ],
)
@pytest.mark.parametrize("elements", [4, 8])
def test_logits_that_do_not_follow_their_weights_are_refused(kernel, beside, message, elements):
    """A norm of queries or keys, and DoRA, undo the scaling, which would go on at every step; `bias_k` is one key.

    With eight elements the norm may be one of what the weights read, or of all their heads.
    """
    named = {f"a.attn.{name}.weight": Parameter(torch.ones(8, 8)) for name in ("q_proj", "k_proj")}
    named[f"a.attn.{beside}"] = Parameter(torch.ones(elements))
    with pytest.raises(ValueError, match=message):
        kernel.Muon(named.items(), qk_clip={"head_dim": HEAD})


def test_modules_around_the_projections_are_looked_through(kernel):
    named = {f"a.attn.{name}.proj.weight": Parameter(torch.ones(8, 8)) for name in ("q", "k")}
    named["a.attn.q_norm.weight"] = Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"because of a\.attn\.q_norm\.weight: leave qk_clip out"):
        kernel.Muon(named.items(), qk_clip={"head_dim": HEAD, "layers": [list(named)[:2]]})


def test_a_norm_of_what_the_weights_read_does_no_harm(kernel):
    named = {f"a.attn.{name}.weight": Parameter(torch.ones(8, 6)) for name in ("q_proj", "k_proj")}
    named["a.attn.norm_q.weight"] = Parameter(torch.ones(6))
    clipped(kernel, named, "a.attn")
    assert named["a.attn.q_proj.weight"].unique().tolist() == [FACTOR]


@pytest.mark.parametrize("norm", ["q_norm", "ln_k"])
def test_a_norm_of_all_queries_or_keys_beside_a_fused_weight_is_refused(kernel, norm):
    """It has as many elements as the fused weight has columns, and is still none of what the weight reads."""
    named = {"a.attn.qkv.weight": Parameter(torch.ones(24, 8)), f"a.attn.{norm}.weight": Parameter(torch.ones(8))}
    with pytest.raises(ValueError, match=f"because of a.attn.{norm}.weight: leave qk_clip out"):
        kernel.Muon(named.items(), qk_clip={"head_dim": HEAD})


def test_by_head_is_for_fused_weights(kernel):
    named = {f"a.attn.{name}.weight": Parameter(torch.ones(8, 8)) for name in ("q_proj", "k_proj")}
    with pytest.raises(ValueError, match=r"by_head of qk_clip is for fused weights, and a\.attn\.q_proj\.weight has"):
        kernel.Muon(named.items(), qk_clip={"head_dim": HEAD, "by_head": True})


OUTSIDE = "a.norm1", "a.q_norm", "a.input_layernorm", "a.post_attention_norm", "a.attn2.q_norm"
INSIDE = "ln", "norm", "norm1", "out_norm", "v_norm", "kv_norm", "qk", "query_key_value", "norm.v", "cross_attn.q_norm"
INSIDE += "q_a_layernorm", "kv_a_layernorm", "indexer.k_norm", "norm_added_k", "v_proj.lora_magnitude_vector"


@pytest.mark.parametrize("beside", [f"{name}.weight" for name in (*OUTSIDE, *(f"a.attn.{name}" for name in INSIDE))])
def test_other_norms_do_not_matter(kernel, beside):
    named = {f"a.attn.{name}.weight": Parameter(torch.ones(8, 8)) for name in ("q_proj", "k_proj")}
    named[beside] = Parameter(torch.ones(8))
    clipped(kernel, named, "a.attn")
    assert named["a.attn.q_proj.weight"].unique().tolist() == [FACTOR]


def test_a_bias_with_more_rows_than_its_weight_is_refused(kernel):
    shapes = {"attn.q_proj.weight": (16, 8), "attn.k_proj.weight": (16, 8), "attn.q_proj.bias": (20,)}
    params = {name: Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=r"scale attn\.q_proj\.bias, which has 20 rows, like a weight of 16 rows"):
        kernel.Muon(params.items(), qk_clip={"head_dim": 4})


def test_a_weight_with_a_gradient_is_clipped_once_beside_one_without(kernel):
    attention = copy.deepcopy(KINDS["mha"])
    matrices = {"is_muon": lambda name, p: p.ndim == 2, "lr": 0.0}
    optimizer = kernel.Muon(attention.named.items(), qk_clip=attention.settings, **matrices)
    before = attention.largest_logits()
    optimizer.observe_qk_logits("attn", before)
    attention.set_gradients(0)
    attention.named["attn.k_proj.weight"].grad = None
    optimizer.step()
    torch.testing.assert_close(attention.largest_logits(), before.clamp_max(THRESHOLD), rtol=1e-5, atol=0)


def test_other_names_may_come_twice(kernel):
    attention = copy.deepcopy(KINDS["mha"])
    norms = [{"params": [("norm.weight", Parameter(torch.ones(8)))]} for _ in range(2)]
    groups = [{"params": list(attention.named.items())}, *norms]
    optimizer = kernel.Muon(groups, qk_clip=attention.settings, lr=0.0)
    optimizer.observe_qk_logits("attn", attention.largest_logits())
    optimizer.step()
    assert attention.largest_logits().max() < 1.01 * THRESHOLD
