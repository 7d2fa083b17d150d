"""Factors of LoRA: both are Muon's, or AdamW's where the layer is that they adapt, and explain() says what is known."""

import pytest
import torch
from torch.nn import Parameter

from tests.muon.test_advice import noted, warned


@pytest.mark.parametrize("rank", [4, 8, 16, 64])
@pytest.mark.parametrize(
    "names",
    [
        (
            "base_model.model.layers.0.q_proj.lora_A.default.weight",
            "base_model.model.layers.0.q_proj.lora_B.default.weight",
        ),
        ("layers.0.attn.q_proj.lora_a.weight", "layers.0.attn.q_proj.lora_b.weight"),
        ("down_blocks.0.to_q.lora.down.weight", "down_blocks.0.to_q.lora.up.weight"),
        ("lora_unet_mid_block_to_q.lora_down.weight", "lora_unet_mid_block_to_q.lora_up.weight"),
    ],
    ids=["peft", "torchtune", "diffusers", "kohya"],
)
def test_both_factors_of_lora_are_muons_and_explain_says_what_is_known(kernel, names, rank):
    """However long they are; their steps are as large as those of other matrices."""
    shapes = (rank, 4096), (4096, rank)
    lines, optimizer = warned(
        lambda: kernel.Muon([(name, Parameter(torch.zeros(s))) for name, s in zip(names, shapes)])
    )
    explanation = optimizer.explain()
    assert [(row.branch, row.reason) for row in explanation.rows] == [("muon", "lora:a"), ("muon", "lora:b")]
    assert [row.multiplier for row in explanation.rows] == [pytest.approx(0.2 * 64)] * 2
    (note,) = noted(explanation)
    assert (
        lines == [] and note.startswith("Muon updates 2 LoRA factors") and "arXiv:2605.10468" in note and "1314" in note
    )


@pytest.mark.parametrize(
    "layer, role",
    [
        ("base_model.model.model.language_model.lm_head", "output_head:lm_head"),
        ("base_model.model.embed_out", "embedding:embed_out"),
        ("base_model.model.model.layers.0.mlp.gate", "router:gate"),
        ("base_model.model.model.embed_tokens", "embedding:embed_tokens"),
    ],
)
@pytest.mark.parametrize(
    "factors",
    [
        ("lora_A.default.weight", "lora_B.default.weight"),
        ("lora_a.weight", "lora_b.weight"),
        ("lora.down.weight", "lora.up.weight"),
        ("lora_A", "lora_B"),
    ],
    ids=["peft", "torchtune", "diffusers", "loralib"],
)
def test_lora_of_heads_tables_and_routers_stays_with_adamw(kernel, layer, role, factors):
    """Both factors have the role of the layer that they adapt."""
    shapes = (8, 64), (128, 8)
    rows = kernel.route([(f"{layer}.{name}", Parameter(torch.zeros(s))) for name, s in zip(factors, shapes)]).rows
    assert [(row.branch, row.reason) for row in rows] == [("adamw", role)] * 2


def test_lora_of_tiny_rank_is_not_muons_and_that_is_said(kernel):
    params = [("q.lora_A.weight", Parameter(torch.zeros(2, 64))), ("q.lora_B.weight", Parameter(torch.zeros(64, 2)))]
    (line,), _ = warned(lambda: kernel.Muon(params))
    assert line.startswith("Muon has no matrix") and "min_dim_too_small (2)" in line


def test_words_with_lora_in_them_are_no_factors(kernel):
    explanation = kernel.route(
        [("explora.a.weight", Parameter(torch.zeros(4, 1024))), ("x.lora_alpha", Parameter(torch.zeros(8, 8)))]
    )
    assert [row.reason for row in explanation.rows] == ["extreme_aspect_ratio:256.0", "matrix"]
