"""Which parameter goes where, and why."""

import inspect
import json
import re

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters

pytestmark = pytest.mark.kernels_ci


@pytest.fixture(scope="module")
def golden(repository):
    return json.loads((repository / "tests/golden/routing.json").read_text())


def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(shape))


def branches(kernel, named_shapes):
    rows = kernel.route([(name, parameter(*shape)) for name, shape in named_shapes]).rows
    return {row.name: (row.branch, row.reason) for row in rows}


def test_objections_to_shapes_equal_timms(kernel, golden):
    for case in golden["timm"]:
        if case.get("min_dim_size", 4) != 4:  # which timm can be told, and this package cannot
            continue
        objection = kernel.parameters.routing.objection_to(tuple(case["shape"]), case.get("max_aspect_ratio", 128.0))
        assert objection == (None if case["suitable"] else case["reason"]), case


def test_names_exclude_at_least_what_the_wrapper_excludes(kernel, golden):
    """Stricter than the wrapper where its docstring is: embeddings and heads never go to Muon."""
    # It knows no convolutions.
    cases = [case for case in golden["make_param_groups"] if case["requires_grad"] and len(case["shape"]) < 3]
    routes = branches(kernel, [(case["name"], case["shape"]) for case in cases])
    # A parameter of one particular model (modded-nanogpt) that the wrapper knows by name.
    particular = {"layers.1.smear"}
    for case in cases:
        if case["group"] == "non_matrix" and case["name"] not in particular:
            assert routes[case["name"]][0] == "adamw", case["name"]
    assert routes["layers.0.mlp.up.weight"] == routes["layers.0.moe.experts.0.w1.weight"] == ("muon", "matrix")
    for name in ("wte.weight", "lm_head.weight", "tok_embeddings.weight", "layers.0.norm2d.weight"):
        assert routes[name][0] == "adamw", name


@pytest.mark.parametrize(
    "name, shape, reason",
    [
        ("model.embed_tokens.weight", (512, 64), "embedding:embed_tokens"),
        ("_orig_mod.transformer.wpe.weight", (128, 64), "embedding:wpe"),
        ("encoder.rel_pos_emb.weight", (32, 64), "embedding:rel_pos_emb"),
        ("shared.weight", (512, 64), "embedding:shared"),
        ("lm_head.weight", (512, 64), "output_head:lm_head"),
        ("module.model.output.weight", (512, 64), "output_head:output"),
        ("head.fc.weight", (10, 64), "output_head:fc"),
        ("classifier.weight", (10, 64), "output_head:classifier"),
        ("encoder.block.0.relative_attention_bias.weight", (32, 8), "embedding:relative_attention_bias"),
        ("patch_embed.proj.weight", (64, 48), "embedding:patch_embed"),
        ("cls.predictions.decoder.weight", (512, 64), "output_head:decoder"),
        ("proj_out.weight", (512, 64), "output_head:proj_out"),
        ("heads.0.weight", (10, 64), "output_head:0"),
        ("layers.0.mixer.A_log", (96, 16), "state_space:a_log"),
        ("layers.3.block_sparse_moe.gate.weight", (8, 64), "router:gate"),
        ("layers.3.moe.router.layer.weight", (8, 64), "router:layer"),
        ("layers.0.q_norm.weight", (8, 64), "norm:q_norm"),
        ("layers.0.attn.bias", (8, 64), "bias"),
        ("layers.0.attn.attention_biases", (8, 196), "bias"),
        ("layers.0.attn.pos_bias_u", (8, 64), "bias"),
        ("layers.0.attn.pos_bias", (8, 64), "bias"),  # and so without weight decay in `groups_for`
        ("layers.0.attn.relative_position_bias", (8, 64), "bias"),
        ("layers.0.attn.rel_pos_h", (127, 64), "embedding:rel_pos_h"),
        ("encoder.positional_encoding", (128, 64), "embedding:positional_encoding"),
        ("encoder.pos_encodings", (128, 64), "embedding:pos_encodings"),
        ("encoder.pe", (1, 128, 64), "leading_unit_dims"),
        ("layers.0.q_clip.scale", (48, 128), "scale"),
        ("layers.0.lora_A.weight", (2, 64), "min_dim_too_small:2"),
        ("embed_tokens.weight", (5000, 16), "embedding:embed_tokens"),  # not because it is long: nothing is amiss
        ("visual.conv1.weight", (64, 3, 14, 14), "embedding:conv1"),
        ("vision_encoder.patch_conv.weight", (64, 3, 8, 8), "embedding:patch_conv"),
        ("vision.patch_embedder.input_proj.weight", (64, 48), "embedding:patch_embedder"),
        ("embeddings.patch_projection.weight", (64, 48), "embedding:patch_projection"),
        ("perceiver.latents", (32, 64), "embedding:latents"),
        ("memory_tokens", (16, 64), "embedding:memory_tokens"),
        ("blocks.0.attn.rel_pos_t", (15, 64), "embedding:rel_pos_t"),
        ("encoder.rel_pos_bias.weight", (12, 32), "embedding:rel_pos_bias"),
        ("layers.0.attn.rel_logits_proj.proj", (16, 64), "embedding:rel_logits_proj"),
        ("layers.0.static_alpha", (4, 5), "scale"),
        ("layers.0.attn.r_k", (4, 64), "scale"),
        ("class_labels_classifier.weight", (92, 64), "output_head:class_labels_classifier"),
        ("class_embed.0.weight", (91, 64), "output_head:0"),
        ("roi_heads.box_predictor.cls_score.weight", (91, 64), "output_head:cls_score"),
        ("talker.codec_head.weight", (512, 64), "output_head:codec_head"),
        ("roi_heads.box_predictor.bbox_pred.weight", (364, 64), "output_head:bbox_pred"),
        ("_fc.weight", (1000, 64), "output_head:fc"),
        ("model.audio.lm_heads.0.weight", (512, 64), "output_head:0"),
        ("patch_embed_proj.weight", (64, 3, 8, 8), "embedding:patch_embed_proj"),
        ("0.patch_embed.proj.weight", (64, 32, 2, 2), "embedding:patch_embed"),
        ("compressor.ape", (8, 64), "embedding:ape"),
        ("prompts.0", (20, 64), "embedding:prompts"),
        ("value_embeds.0.weight", (512, 64), "embedding:value_embeds"),
        ("model.decoder.embed_tokens.3.weight", (512, 64), "embedding:embed_tokens"),
        ("input_embeds_layers.1.weight", (512, 64), "embedding:input_embeds_layers"),
        ("embeddings.xpath_tag_sub_embeddings.7.weight", (512, 64), "embedding:xpath_tag_sub_embeddings"),
        ("led.shared.weight", (512, 64), "embedding:shared"),
        ("model.language_model.shared.weight", (512, 64), "embedding:shared"),
        ("queries_features.weight", (100, 64), "embedding:queries_features"),
        ("query_feat.weight", (100, 64), "embedding:query_feat"),
        ("decoder.mask_tokens.weight", (4, 64), "embedding:mask_tokens"),
        ("encoder.relative_attention_bias_layer.bias_values.weight", (64, 16), "embedding:bias_values"),
        ("joint.head.weight", (512, 64), "output_head:head"),
        ("classif.weight", (1000, 64), "output_head:classif"),
        ("model.generation_head.vision_head.weight", (512, 64), "output_head:vision_head"),
        ("segmentation_head.0.weight", (21, 16, 3, 3), "output_head:0"),
        ("aux_classifier.4.weight", (21, 64, 1, 1), "output_head:4"),
        ("AuxLogits.fc.weight", (100, 64), "output_head:fc"),
        ("decoder.decoder_pred.weight", (96, 64), "output_head:decoder_pred"),
        ("visual.attn_pool.query", (32, 64), "embedding:query"),
        ("layers.0.norm.weight", (64,), "insufficient_dims"),
        ("base_model.model.model.embed_tokens.modules_to_save.default.weight", (512, 64), "embedding:embed_tokens"),
        ("base_model.model.classifier.modules_to_save.default.weight", (10, 64), "output_head:classifier"),
        ("base_model.model.lm_head.base_layer.weight", (512, 64), "output_head:lm_head"),
        ("base_model.model.lm_head.lora_B.default.weight", (512, 16), "output_head:lm_head"),
        ("base_model.model.embed_tokens.lora_embedding_A.default", (16, 512), "embedding:lora_embedding_a"),
    ],
)
def test_non_hidden_parameters_go_to_adamw(kernel, name, shape, reason):
    assert branches(kernel, [(name, shape)])[name] == ("adamw", reason)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("bert.encoder.layer.0.attention.output.dense.weight", (64, 64)),
        ("layers.0.mlp.gate_proj.weight", (256, 64)),
        ("layers.0.mlp.gate.weight", (256, 64)),
        ("layers.0.mlp.shared_expert.up_proj.weight", (256, 64)),
        ("layers.0.mlp.shared.up_proj.weight", (256, 64)),
        ("layers.0.mlp.shared.weight", (256, 64)),
        ("time_embeds.0.weight", (256, 64)),
        ("cls.predictions.transform.dense.weight", (64, 64)),
        ("layers.0.joint.head.weight", (64, 64)),
        ("layers.1.classif.weight", (256, 256)),
        ("model.vision_head.fc1.weight", (64, 64)),
        ("layers.0.query_feat.weight", (64, 64)),
        ("predictions.dense.weight", (128, 768)),
        ("cls.predictions.dense.weight", (1664, 1152)),
        ("encoder.shared.weight", (256, 256)),
        ("timestep_embeddings.2.weight", (256, 256)),
        ("cond_embeds.0.weight", (256, 64)),
        ("blocks.0.pos_embeds.2.weight", (256, 256)),
        ("time_embedding.linear_1.weight", (256, 64)),
        ("normalizing_flow.0.weight", (64, 64)),
        ("layers.0.attn.head.weight", (64, 64)),
        ("decoder.layers.0.proj_out.weight", (64, 64)),
        ("transformer.h.0.attn.c_attn.weight", (192, 64)),
        ("blocks.0.attn.qkv.weight", (192, 64)),
        ("0.weight", (16, 16)),
        ("_conv_head.weight", (64, 32, 1, 1)),
        ("decoder.weight_hh_l0", (256, 64)),
        ("resnets.0.time_emb_proj.weight", (64, 128)),
        ("encoder.embedding_hidden_mapping_in.weight", (256, 64)),
        ("stages.1.patch_embeddings.proj.weight", (128, 64, 3, 3)),
        ("patch_embed2.proj.weight", (128, 64, 2, 2)),
        ("patch_embed.conv.3.weight", (64, 64, 3, 3)),
        ("stem.conv1.weight", (64, 3, 7, 7)),
        ("patch_embed10.proj.weight", (128, 64, 2, 2)),
        ("attn.w_queries", (64, 32)),
        ("pre_logits.weight", (64, 64)),
        ("relative_position_bias_mlp.0.weight", (64, 64)),
        ("decoder.weight_ih", (256, 64)),
    ],
)
def test_hidden_matrices_go_to_muon(kernel, name, shape):
    branch, reason = branches(kernel, [(name, shape)])[name]
    assert (branch, reason.partition(":")[0]) == ("muon", "matrix")


def test_thin_and_extreme_shapes_go_to_adamw_unless_forced(kernel):
    shapes = {"depthwise": (16, 1, 3, 3), "thin": (3, 64), "extreme": (4, 1024), "pos": (1, 16, 12)}
    params = {f"{name}.weight": Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    branches = [row.branch for row in kernel.Muon(params.items()).explain().rows]
    forced = kernel.Muon(params.items(), is_muon=lambda name, p: True, stacked=False).explain().rows
    assert branches == ["adamw"] * 4 and [row.branch for row in forced] == ["muon"] * 4


def test_any_name_of_a_tied_parameter_can_exclude_it(kernel):
    """It comes once, under its first name."""
    tied = parameter(64, 32)
    (row,) = kernel.route([("decoder.proj.weight", tied), ("lm_head.weight", tied)]).rows
    assert (row.name, row.branch, row.reason) == ("decoder.proj.weight", "adamw", "output_head:lm_head")


def test_is_muon_overrides_routing_and_none_keeps_it(kernel):
    params = [("wte.weight", parameter(64, 32)), ("up.weight", parameter(64, 32)), ("down.weight", parameter(32, 64))]
    verdicts = {"wte.weight": True, "up.weight": False}
    rows = kernel.route(params, is_muon=lambda name, p: verdicts.get(name)).rows
    assert [(row.branch, row.reason) for row in rows] == [
        ("muon", "is_muon"),
        ("adamw", "is_muon"),
        ("muon", "matrix"),
    ]
    with pytest.raises(ValueError, match=r"norm.weight, which is not a matrix: its shape is \(32,\)"):
        kernel.route([("norm.weight", parameter(32))], is_muon=lambda name, p: True)


def test_is_muon_is_asked_by_name_and_none_keeps_routing(kernel):
    verdicts = {"wte.weight": True, "down.weight": False}
    optimizer = kernel.Muon(named_parameters().items(), is_muon=lambda name, p: verdicts.get(name))
    routes = {row.name: (row.branch, row.reason) for row in optimizer.explain().rows}
    assert routes["wte.weight"] == ("muon", "is_muon") and routes["down.weight"] == ("adamw", "is_muon")
    assert routes["up.weight"] == ("muon", "matrix")


def test_routing_rows_print_as_a_table(kernel):
    """They name the multiplier."""
    table = kernel.route([("up.weight", parameter(64, 36)), parameter(5)], adjust_lr_fn="original")
    assert table.rows[0]._asdict() == dict(
        name="up.weight", shape=(64, 36), branch="muon", reason="matrix", matrices=1, multipliers=((64 / 36) ** 0.5,),
        owner=None, kernel=None, lr=None, weight_decay=None, state_bytes=None, flops=None,
    )  # fmt: skip
    assert [row.multiplier for row in table.rows] == [(64 / 36) ** 0.5, None]
    assert table.rows[1].name == "param_1"
    lines = str(table).splitlines()
    assert lines[0].split() == ["name", "shape", "branch", "reason", "matrices", "multiplier"]
    assert lines[2].split()[:4] == ["up.weight", "64x36", "muon", "matrix"]
    assert lines[-1] == "1 parameter (2,304 elements) by Muon, 1 (5 elements) by AdamW"


@pytest.mark.parametrize(
    "settings, error",
    [
        (dict(expert_keys="experts"), TypeError),
        (dict(stacked="yes"), TypeError),
        (dict(update_rms=-3), ValueError),
        (dict(update_rms=0.3, adjust_lr_fn="original"), ValueError),
    ],
    ids=str,
)
def test_values_that_muon_refuses_are_refused(kernel, settings, error):
    for call in (kernel.route, kernel.Muon):
        with pytest.raises(error, match=r"expert_keys|stacked|update_rms"):
            call([("experts.up", parameter(2, 8, 8)), ("up.weight", parameter(8, 8))], **settings)


def test_non_parameters_are_refused(kernel):
    with pytest.raises(TypeError, match="got str at position 1"):
        kernel.route([parameter(4, 4), "weight"])


def test_roles_are_all_that_names_show(kernel):
    roles = kernel.parameters.roles
    assert {*roles.ROLES} == {*re.findall(r'return f?"(\w+)', inspect.getsource(roles.role_by_name))}
