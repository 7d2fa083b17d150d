"""What the names of parameters tell, through wrappers and in the conventions of each library."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import Parameter


def branches(kernel, named_shapes):
    rows = kernel.route([(name, Parameter(torch.zeros(shape))) for name, shape in named_shapes]).rows
    return {row.name: (row.branch, row.reason) for row in rows}


# By hand, from the names that each library gives to a layer that it has wrapped.
WRAPPED = {
    "_forward_module.model.head.weight": "output_head:head",  # Lightning, Fabric
    "module._forward_module.model.head.weight": "output_head:head",
    "_fsdp_wrapped_module.model.head.weight": "output_head:head",
    "base_model.model.head.weight": "output_head:head",  # PEFT
    "base_model.model.head.modules_to_save.default.weight": "output_head:head",
    "base_model.model.head.original_module.weight": "output_head:head",
    "base_model.model.head.base_layer.weight": "output_head:head",
    "base_model.model.model.embed_tokens.base_layer.weight": "embedding:embed_tokens",
    "base_model.model.model.embed_tokens.token_adapter.base_layer.weight": "embedding:embed_tokens",
    "base_model.model.model.words.trainable_tokens_delta.default": "embedding:trainable_tokens_delta",
    "base_model.model.words.token_adapter.trainable_tokens_delta.default": "embedding:trainable_tokens_delta",
    "model.embed.parametrizations.weight.original": "embedding:embed",  # torch.nn.utils.parametrize
    "model.embed.parametrizations.weight.original0": "embedding:embed",
    "model.head.parametrizations.weight.original1": "output_head:head",
    "head.weight_v": "output_head:head",  # torch.nn.utils.weight_norm
}
HIDDEN = "layers.0.attn.proj"
HIDDEN_WRAPPED = [name.replace("model.head", f"model.{HIDDEN}") for name in WRAPPED if "model.head" in name]


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_do_not_hide_what_a_layer_is(kernel, name):
    assert branches(kernel, [(name, (64, 32))])[name] == ("adamw", WRAPPED[name])


HEADS = ["out", "linear", "final", "final_layer", "last_linear", "last_layer", "policy_head", "cls_head"]
HEADS += ["classifier_head", "classification_head", "fc", "output", "proj_out"]


@pytest.mark.parametrize("prefix", ["", "model.", "module.net.", "base_model.model."])
@pytest.mark.parametrize("layer", [*HEADS, "tok", "pos", "shared"])
def test_names_that_mean_little_deep_inside_are_heads_and_tables_at_the_top(kernel, layer, prefix):
    top, deep = f"{prefix}{layer}.weight", [f"{prefix}{place}{layer}.weight" for place in ("blocks.0.", f"{layer}.0.")]
    routes = branches(kernel, [(name, (64, 32)) for name in (top, *deep)])
    kind = "output_head" if layer in HEADS else "embedding"
    assert routes == {top: ("adamw", f"{kind}:{layer}"), **dict.fromkeys(deep, ("muon", "matrix"))}


@pytest.mark.parametrize("layer", ["qa_outputs", "lm_head", "unembed"])
def test_some_names_are_heads_anywhere(kernel, layer):
    name = f"decoder.{layer}.weight"
    assert branches(kernel, [(name, (64, 32))])[name] == ("adamw", f"output_head:{layer}")


@pytest.mark.parametrize(
    "name",
    [
        "stages.1.blocks.0.attn.relative_position_bias_table", "user_table.weight",
        "quantizer.codebook.weight", "src_embed.0.lut.weight",
    ],
)  # fmt: skip
def test_tables_and_codebooks_are_known_anywhere(kernel, name):
    assert branches(kernel, [(name, (64, 32))])[name][1].startswith("embedding:")


@pytest.mark.parametrize("name", ["scale_shift_table", "blocks.0.audio_scale_shift_table", "head.modulation"])
def test_what_is_added_to_modulations_is_a_scale(kernel, name):
    """PixArt's, LTX 2's and Wan's, which has a dimension of size one before."""
    assert branches(kernel, [(name, (6, 64))])[name] == ("adamw", "scale")
    block = nn.Module()
    block.register_parameter(name.rpartition(".")[2], Parameter(torch.zeros(1, 6, 64)))
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "block": block})
    (group,) = [group for group in kernel.groups_for(model) if group["role"] == "scale"]
    assert group["weight_decay"] == 0.0


FURTHER_HEADS = {
    "model.layers.61.shared_head.head.weight": "head",  # DeepSeek-V3, GLM
    "mtp.0.head.weight": "head",
    "model.mtp_layers.0.lm_head.weight": "lm_head",
    "medusa_head.0.1.weight": "1",
    "decoder.head.weight": "head",  # VideoMAE
    "final_layer.linear.weight": "linear",  # DiT, Flux
    "all_final_layer.2-1.linear.weight": "linear",  # Z-Image
    "output_projection_point.residual_layer.weight": "residual_layer",  # TimesFM
}


@pytest.mark.parametrize("name", FURTHER_HEADS)
def test_heads_for_further_tokens_and_of_diffusion_transformers_are_heads(kernel, name):
    assert branches(kernel, [(name, (64, 32))])[name] == ("adamw", f"output_head:{FURTHER_HEADS[name]}")


HIDDEN_BESIDE_HEADS = [
    "medusa_head.0.0.linear.weight",
    "mtp.0.mlp.up.weight",
    "mtp.0.attn.head.weight",
    "blocks.0.final_layer.linear.weight",
]
RESEMBLING = [
    *HIDDEN_BESIDE_HEADS,
    "conv_head.weight",
    "blocks.0.tablet.weight",
    "time_embed.0.weight",
    "blocks.0.table_proj.weight",
    "blocks.0.query",
    "decoder_order_head.0.weight",
    "head.attention.in_proj_weight",  # SigLIP's, which pools
    "decoder.input_ff_layer.output_layer.weight",  # TimesFM
    "decoder.input_ff_layer.residual_layer.weight",
    "tokenizer.output_layer.weight",
    "encoder.embeds.dense.weight",
]


@pytest.mark.parametrize("name", [*RESEMBLING, *HIDDEN_WRAPPED])
def test_hidden_layers_stay_hidden_in_wrappers_and_with_names_like_those_of_heads_and_tables(kernel, name):
    assert branches(kernel, [(name, (64, 32))])[name] == ("muon", "matrix")


PATCHES = [
    "patch_embed.proj.weight",  # timm, nanoViT
    "patch_embed1.proj.weight",
    "model.vision_tower.embeddings.patch_embedding.weight",  # CLIP
    "vit.embeddings.patch_embeddings.projection.weight",  # transformers
    "encoder.patch_embeddings.0.proj.weight",
    "conv_proj.weight",  # torchvision
    "to_patch_embedding.2.weight",  # vit-pytorch
]


@pytest.mark.parametrize("name", PATCHES)
def test_patch_embeddings_go_one_way_in_every_library(kernel, name):
    """Convolutions and linear layers."""
    routes = branches(kernel, [(name, (48, 3, 4, 4)), (f"module.{name}", (48, 48))])
    assert {branch for branch, _ in routes.values()} == {"adamw"}
    assert all(reason.startswith("embedding:") for _, reason in routes.values())


@pytest.mark.parametrize("name", ["x_embedder.proj.weight", "model.pos_embed.proj.weight", "img_in.proj.weight"])
def test_kernels_that_embed_patches_of_latents_are_known_in_diffusion_transformers(kernel, name):
    """DiT's, PixArt's and HunyuanVideo's; a layer of that name embeds positions."""
    routes = branches(kernel, [(name, (48, 16, 2, 2)), (f"blocks.0.{name}", (48, 48))])
    assert list(routes.values()) == [("adamw", f"embedding:{name.split('.')[-3]}"), ("muon", "matrix")]


@pytest.mark.parametrize("name", ["all_x_embedder.2-1.weight", "x_embedders.image.weight", "embeds.proj.weight"])
def test_lists_of_layers_that_embed_patches_are_known(kernel, name):
    """Z-Image's, Flux 3's and NaFlexViT's."""
    assert branches(kernel, [(name, (64, 16))])[name] == ("adamw", f"embedding:{name.split('.')[0]}")


@pytest.mark.parametrize("name", ["context_embedder.weight", "patch_embed.text_proj.weight"])
def test_layers_that_read_a_text_encoder_are_hidden(kernel, name):
    """Flux's, SD3's and CogVideoX's; a table of that name is long."""
    assert branches(kernel, [(name, (64, 96))])[name] == ("muon", "matrix")
    name = "context_embedder.weight"
    assert branches(kernel, [(name, (512, 64))])[name] == ("adamw", "embedding:context_embedder")


def test_fluxs_first_layer_embeds_patches_of_latents(kernel):
    routes = branches(kernel, [("img_in.weight", (64, 16)), ("blocks.0.img_in.weight", (64, 16))])
    assert list(routes.values()) == [("adamw", "embedding:img_in"), ("muon", "matrix")]


@pytest.mark.parametrize(
    "name",
    ["pos_embed.token_projection.weight", "patch_embed.backbone.stages.0.conv.weight", "blocks.0.conv_proj.weight"],
)
def test_convolutions_beside_a_patch_embedding_are_hidden(kernel, name):
    """As timm's hybrid networks have them."""
    assert branches(kernel, [(name, (48, 12, 3, 3))])[name] == ("muon", "matrix: flatten 48x108")


def test_a_heads_name_is_lost_within_the_head(kernel):
    """As where the head has a group and a rate for itself; with a prefix it is a head again."""
    model = nn.ModuleDict({"backbone": nn.Linear(16, 16), "head": nn.Linear(16, 100)})

    def made(prefix: str):
        backbone = {"params": model["backbone"].named_parameters("backbone"), "lr": 1e-3}
        return kernel.Muon([backbone, {"params": model["head"].named_parameters(prefix), "lr": 1e-2}])

    with pytest.warns(UserWarning, match=r'^weight \(100, 16\): matrices without names.*prefix="head"'):
        made("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = made("head")
    assert {row.name: row.branch for row in optimizer.explain()}["head.weight"] == "adamw"


@pytest.mark.parametrize("names", [None, "ab"])
def test_names_of_a_group_are_a_list(kernel, names):
    params = [Parameter(torch.ones(4, 4)), Parameter(torch.ones(4, 4))]
    with pytest.raises(TypeError, match=f"^param_names must be a list of names, got {names!r}"):
        kernel.Muon([{"params": params, "param_names": names}])
