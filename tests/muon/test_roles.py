"""What names alone show about parameters, in the words of many libraries."""

from __future__ import annotations

import pytest

LAYERS = "linear", "dense", "conv", "mlp", "att", "qkv", "query", "proj"
NETWORKS = "model", "net", "network", "ensemble", "members", "critics", "actor", "q_net", "q_networks"
TOP_PARTS = "codec_head", "decoder_pred", "head_dist", "output_head", "output_layer", "output_projection", "qa_outputs"
TOP_PARTS += "codebooks_head", "logits", "to_logits", "unembed", "head", "heads", "score", "aux_classifier"
TABLES = "wte", "wpe", "lut", "table", "codebook", "relative_attention_bias", "pos_encoding", "mask_tokens", "rel_pos"
TABLES += "bias_values", "trainable_tokens_delta", "pe", "ape", "latents", "bias", "scale", "gamma", "alpha", "r_k"
TABLES += "static_alpha", "modulation", "scale_shift_table"
PARTS_OF_EXPERTS = "experts.0", "shared_expert", "local_expert", "routed_expert", "expert_1", "shared_experts", "expert"

# By role; parameters are 64 x 64.
NAMES = {
    "embedding": [
        *("emb.weight", "emb_tokens.weight", "table.weight", "audio_codebook.weight", "text.rel_pos_enc.weight"),
        *("mask_decoder.iou_token.weight", "mask_decoder.obj_token.weight", "encoder.speech_embed_tokens.0.weight"),
        *("memory", "reader.mems", "reader.mem", "pool.latent_query", "reader.queries"),
        *("patch_to_embedding.linear.weight", "embed_patches.proj.weight", "encoder.pe", "encoder.block_ape"),
        "encoder.pos_bias.weight",
    ],
    "output_head": [
        *(f"{trunk}.fc.weight" for trunk in ("model", "net", "network", "transformer", "backbone")),
        *(f"text.reader.{head}.weight" for head in ("classifier", "codebooks_head", "output_head", "logits")),
        *(f"text.reader.{head}.weight" for head in ("output_layer", "output_projection", "score", "to_logits")),
        *(f"text.reader.{head}.weight" for head in ("cls_logits", "class_predictor", "heads_dist", "seq_score_head")),
        *(
            f"text.reader.{head}.weight"
            for head in ("audio_heads.0", "text_logits.0", "logits_text", "layers.0.cls_logits")
        ),
        *(f"{part}.inner.dense.weight" for part in TOP_PARTS),
        *(f"{layer}.weight" for layer in ("last_fc", "final_proj", "fc_out", "generator")),
        *(f"{network}.0.text.decoder.weight" for network in (*NETWORKS, "backbone", "aux_heads")),
        "0.text.decoder.weight",
        "output_projection_quantiles.residual_layer.weight",
        "layers.61.shared_head.output.weight",
        "text.horizon_ff_layer.residual_layer.weight",
    ],
    "norm": ["layers.0.ln1.weight", "bn1.weight", "layers.0.bn.weight"],
    "scale": [
        *("layer.gamma", "layer.dynamic_alpha", "layer.static_beta", "layer.alpha", "layer.betas", "layer.lambda"),
        *("layer.bonus", "layer.time_faaaa", "layer.lower_bounds"),
    ],
    "bias": ["pos_bias", "position_biases"],
    "state_space": ["mixer.A_log", "mixer.A_logs"],
    None: [
        *(f"layers.0.norm_{layer}.weight" for layer in LAYERS),
        *(f"layers.0.embed_{layer}.weight" for layer in ("proj", "dense", "mapping", "mapper", "transform")),
        *(f"layers.0.{table}_proj" for table in TABLES),
        *("t_embeds.0.weight", "image_embeds.0.weight", "decoder_embed.weight"),
        *("attn.weight_queries", "attn.fast_mem", "decoder.weight_hr_l0"),
        *("head.attn.dense.weight", "head.attention.dense.weight", "text.attn.decoder.weight"),
        *("text.self_attention.decoder.weight", "conv_head.0.weight", "layers.0.text.decoder.weight"),
        *("segmentation_head.convs.0.weight", "reader.query"),
    ],
}


@pytest.mark.parametrize("role", NAMES)
def test_names_show_roles(kernel, role):
    shown = {name: kernel.parameters.roles.role_by_name(name, (64, 64)) for name in NAMES[role]}
    assert {name: value and value.partition(":")[0] for name, value in shown.items()} == dict.fromkeys(shown, role)


@pytest.mark.parametrize("name", ["cls.predictions.dense.weight", "coca.text_decoder.text_projection"])
def test_a_head_by_the_name_of_a_hidden_layer_has_a_vocabulary_as_its_columns(kernel, name):
    role_by_name = kernel.parameters.roles.role_by_name
    for prefix in ("", "model.bert."):
        heads = [role_by_name(prefix + name, shape) for shape in ((64, 512), (64, 511))]
        assert (str(heads[0]).partition(":")[0], heads[1]) == ("output_head", None)


@pytest.mark.parametrize(
    "name, shapes, others",
    [
        ("reader.query", [(32, 64), (1, 32, 64)], [(2, 32, 64), (1, 64)]),
        ("conv1.weight", [(64, 4, 12, 12)], [(64, 5, 12, 12), (64, 4, 11, 11), (64, 4, 12, 13)]),
        ("kernel", [], [(64, 3, 16, 16)]),
        ("patch_embed1.proj.weight", [(64, 17, 2, 2)], []),
        ("patch_embed2.proj.weight", [(64, 16, 2, 2)], [(64, 17, 2, 2)]),
    ],
)
def test_a_query_or_a_layer_for_patches_is_an_embedding_by_its_shape(kernel, name, shapes, others):
    role_by_name = kernel.parameters.roles.role_by_name
    assert all(str(role_by_name(name, shape)).startswith("embedding:") for shape in shapes)
    assert [role_by_name(name, shape) for shape in others] == [None] * len(others)


def test_what_reads_features_is_a_table_if_it_is_long(kernel):
    role_by_name = kernel.parameters.roles.role_by_name
    assert role_by_name("decoder_embed.weight", (512, 64)) == "embedding:decoder_embed"
    assert role_by_name("decoder_embed.weight", (511, 64)) is None


@pytest.mark.parametrize("gate", ["gate", "gating", "wg"])
def test_the_gate_of_an_expert_is_no_router(kernel, gate):
    """Elsewhere it is one by its shape, also in a network with numbered blocks that is an expert itself."""
    role_by_name = kernel.parameters.roles.role_by_name
    for part in PARTS_OF_EXPERTS:
        for name in (f"{part}.{gate}.weight", f"layers.0.mlp.{part}.{gate}.weight"):
            assert role_by_name(name, (16, 64)) is None, name
    for name in (f"layers.0.mlp.{gate}.weight", f"expert.layers.0.mlp.{gate}.weight"):
        assert (role_by_name(name, (16, 64)), role_by_name(name, (16, 63))) == (f"router:{gate}", None)
    for part in ("moe", "moe.0", "moe.gate"):
        assert role_by_name(f"layers.0.{part}.{gate}.weight", (16, 17)) == f"router:{gate}"
    assert role_by_name(f"layers.0.moe.{gate}.weight", (16, 16)) is None


def test_heads_for_further_tokens_are_known_by_their_blocks(kernel):
    further = kernel.parameters.roles.predicts_further_tokens
    heads = (
        "model.mtp.0.lm_head",
        "mtp_block.head",
        "layers.61.shared_head.head",
        "medusa_head.0.1",
        "MTP.head.base_layer",
    )
    assert all(further(f"{head}.weight") for head in heads)
    assert not any(map(further, ("lm_head.weight", "mtp.attn.head.weight", "mtp.0.head.bias", "medusa_head.0.weight")))
