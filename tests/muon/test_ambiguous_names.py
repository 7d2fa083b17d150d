"""Names that heads and routers have, and hidden layers too: a place in the network, or a shape, tells them apart."""

import pytest

from tests.muon.test_names import branches

# Names that heads have, of which blocks have hidden layers, too.
AMBIGUOUS = [
    "output_layer",
    "output_projection",
    "to_logits",
    "logits",
    "score",
    "decoder",
    "token_logits",
    "logits_dense",
]
OUTSIDE_OF_BLOCKS = ["{}", "model.{}", "model.decoder.{}", "cls.predictions.{}", "task_heads.0.{}"]
OUTSIDE_OF_BLOCKS += ["1.{}", "model.1.{}", "models.0.{}", "ensemble.1.{}", "q_networks.0.{}"]
BLOCKS = ["blocks.1.attn.{}", "h.3.{}", "model.layers.0.attention.{}", "layers.0.mixer.{}", "encoder.self_attn.{}"]
BLOCKS += ["blocks.0.attn.heads.1.{}", "encoder.attention.heads.1.{}"]


@pytest.mark.parametrize("layer", AMBIGUOUS)
def test_names_that_blocks_have_too_are_heads_outside_of_them(kernel, layer):
    """A block is a module with a number, or an attention; several heads have numbers, too."""
    heads = dict.fromkeys([f"{place.format(layer)}.weight" for place in OUTSIDE_OF_BLOCKS], "output_head")
    hidden = dict.fromkeys([f"{place.format(layer)}.weight" for place in BLOCKS], "matrix")
    routes = branches(kernel, [(name, (64, 32)) for name in {**heads, **hidden}])
    assert {name: reason.split(":")[0] for name, (_, reason) in routes.items()} == {**heads, **hidden}


# By hand: heads of several models, and of several depths, with numbers before or after their names.
NUMBERED_HEADS = {
    "layers.3.lm_head.weight": "lm_head",
    "blocks.2.classifier.weight": "classifier",
    "blocks.2.output_head.weight": "output_head",
    "stages.1.unembed.weight": "unembed",
    "talker.layers.4.codec_head.weight": "codec_head",
    "models.0.qa_outputs.weight": "qa_outputs",
    "to_logits.2.weight": "2",
    "decoder.dec_score_head.5.weight": "5",  # D-FINE
    "decoder.class_embed.5.weight": "5",  # deformable DETR
    "decoder.lm_heads.3.weight": "3",  # MusicGen
    "heads.0.score.weight": "score",
}


@pytest.mark.parametrize("name", NUMBERED_HEADS)
def test_heads_of_clear_names_are_heads_in_blocks_and_in_lists(kernel, name):
    assert branches(kernel, [(name, (64, 32))])[name] == ("adamw", f"output_head:{NUMBERED_HEADS[name]}")


@pytest.mark.parametrize("name", ["cls.predictions.dense.weight", "text_decoder.text_projection"])
def test_names_of_hidden_layers_are_heads_if_their_columns_are_a_vocabulary(kernel, name):
    """MobileBERT's and CoCa's; ALBERT's name is shorter, and its layer long, too."""
    layer = name.split(".")[-2] if name.endswith("weight") else "text_decoder"
    assert branches(kernel, [(name, (64, 512))])[name] == ("adamw", f"output_head:{layer}")
    assert branches(kernel, [(name, (64, 511))])[name] == ("muon", "matrix")
    assert branches(kernel, [("predictions.dense.weight", (64, 2048))])["predictions.dense.weight"][0] == "muon"


# Of each family the shape that its config has by default.
ROUTERS = {
    "model.layers.0.block_sparse_moe.gate.weight": (8, 4096),  # Mixtral
    "model.layers.0.mlp.gate.weight": (256, 7168),  # DeepSeek-V3, Qwen with 128 and 2048, OLMoE with 64 and 2048
    "model.layers.1.mlp.gate.weight": (512, 2560),  # BailingHybrid: none is wider for its height
    "model.layers.2.mlp.gate.weight": (384, 2560),  # Kolibri
    "model.layers.3.mlp.gate.weight": (8, 32),  # small models in tests
    "backbone.layers.0.mixer.gate.weight": (128, 2688),  # Nemotron-H
    "model.layers.0.mlp.text_moe.gate.weight": (64, 2560),  # ERNIE
    "transformer.blocks.0.ffn.router.layer.weight": (16, 6144),  # DBRX
    "layers.0.self_attention.experts.router.layer.weight": (8, 2048),  # JetMoe
    "layers.0.moe.router.gate.weight": (8, 64),  # torchtitan
    "model.layers.0.feed_forward.router.weight": (16, 5120),  # Llama 4, Jamba
    "model.layers.0.mlp.router.classifier.weight": (768, 6144),  # LongCat
    "encoder.layers.3.ffn.router.classifier.weight": (128, 1024),  # NLLB, Switch Transformers
    "layers.0.mlp.deepspeed_moe.gate.wg.weight": (8, 64),  # DeepSpeed
    "encoder.layers.0.moe_layer.gate.wg.weight": (32, 64),  # fairseq
    "layers.0.moe.router.weight": (32, 32),
    "action_expert.layers.3.mlp.gate.weight": (8, 64),  # of a whole network that is called an expert
    "layers.0.mixture_of_expert.gate.weight": (8, 1024),
    "blocks.0.moe.gate.weight": (32, 64),
    "blocks.0.moe.gating.weight": (32, 64),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_each_family_are_routers(kernel, name):
    branch, reason = branches(kernel, [(name, ROUTERS[name])])[name]
    assert (branch, reason) == ("adamw", f"router:{name.split('.')[-2]}")


GATES = {
    "blocks.0.moe.experts.3.gate.weight": (32, 64),
    "blocks.1.moe.experts.3.gate.weight": (8, 64),
    "layers.0.deepspeed_moe.experts.deepspeed_experts.0.gate.weight": (8, 64),
    "layers.0.mlp.experts.expert_2.gate.weight": (8, 64),
    "layers.1.mlp.expert.wg.weight": (8, 64),
    "layers.2.moe.experts.3.0.gate.weight": (8, 64),
    "layers.3.moe.experts.3.ffn.gate.weight": (8, 64),
    "layers.0.moe.shared_expert.ffn.gate.weight": (8, 64),
    "layers.0.moe.shared_experts.gate.weight": (8, 64),
    "layers.0.moe.shared_expert.gate.weight": (8, 64),
    "layers.0.ffn.gate.weight": (32, 64),
    "layers.1.ffn.gate.weight": (704, 2048),
    "layers.2.mlp.wg.weight": (64, 64),
    "layers.3.mlp.gate.weight": (256, 64),
    "layers.0.moe.dense.gate.weight": (32, 64),
    "blocks.2.moe.experts.0.gate.lora_A.default.weight": (8, 64),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_of_experts_and_of_gated_layers_are_hidden(kernel, name):
    """Inside an expert there is no router, whatever the shape; elsewhere a router has few rows for its columns."""
    assert branches(kernel, [(name, GATES[name])])[name][0] == "muon"
