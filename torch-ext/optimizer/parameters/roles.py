"""Roles that names show: embeddings, heads, norms, routers and others that are not hidden layers."""

from __future__ import annotations

import re
from itertools import dropwhile
from typing import Optional, Sequence

from .names import bare_name

# Containers around the whole network: modules directly inside count as the top level.
_TRUNKS = {"model", "net", "network", "transformer", "backbone"}
# Names of embedding tables: anywhere, or only at the top level, since deeper layers with such names are not tables.
# What projects or transforms embeddings is a hidden layer.
_EMBEDDING = re.compile(
    r"((?<!un)embed|(^|_)emb($|_))(?!\w*(proj|dense|mapping|mapper|transform)\w*$)|^wte$|^wpe$|^lut$|(^|_)table$"
    r"|(^|_)codebooks?$|^relative_attention_bias$|^bias_values$|^trainable_tokens_delta$"
    r"|(^|_)pos(ition(al)?)?_enc(odings?)?$|^(mask|iou|obj)_tokens?$"
)
# Hidden layers of such names, unless they are as long as tables: what reads a text encoder in Flux and SD3, and the
# encoder in MAE.
_READS_FEATURES = re.compile(r"^(context_embedder|decoder_embed)$")
# Lists of tables, whose layers have numbers in place of names. What embeds a time, a condition, an image or a position
# is often an MLP, whose layers have numbers, too.
_TABLE_LISTS = re.compile(
    r"(^|_)embed_tokens$|^(?!(\w+_)?(time|timestep|t|cond|image|pos)_embed)(\w+_)?embed(ding)?s(_layers)?$"
)
_TOP_TABLES = {"shared", "tok", "pos"}
# Tables by names that blocks, which have a number, give to hidden layers.
_QUERIES = re.compile(r"^quer(y|ies)_feat(ure)?s?$")
_LONG = 8  # a `shared` layer deeper in the network is a table if it has so many times as many rows as columns
# Names of parameters that are tables without a layer: one row for each query or token that a model learns.
_TABLES = re.compile(
    r"^(?!w_|weight_|fast_)(\w+_)?(latents?|latent_query|queries|tokens?|mem(ory|s)?|prompts?)(_\w?\d\w?)?$"
)
# The module that projects patches; its weight is at most two modules below.
_PATCHES = re.compile(
    r"(^|_)patch(es)?_(embed(ding|der)?s?\d*(_proj(ection)?)?|conv|proj(ection)?|to_embedding)$|^embed_patches$"
)
# What projects patches under other names: a layer for each size or kind of patch in Z-Image and Flux 3, kernels `proj`
# in DiT, PixArt and HunyuanVideo, and a layer at the top in torchvision and in Flux.
_PATCH_LISTS = {"all_x_embedder", "x_embedders"}
_PATCH_KERNELS = {"x_embedder", "pos_embed", "img_in"}
_TOP_PATCHES = {"conv_proj", "img_in"}
_PIXELS = 4  # a convolution with at most so many input channels reads pixels
_PATCH_SIDE = 12  # a convolution that reads pixels reads patches of them if its kernel has at least this side
_FEATURES = 16  # with more input channels, a module that is not the first of its kind reads the features of a stage
# For names of modules and of classes. Layers that begin with a norm are more than that, such as Transformer Engine's
# `layernorm_mlp` and `LayerNormLinear`, or `NormedConv2d`.
NORM = "norm(?!.*(linear|dense|conv|mlp|att|qkv|query|proj))"
_NORM = re.compile(rf"{NORM}|^ln(_|\d|$)|^bn\d*$")
# Names of parameters, not of layers: numbers that are added or multiplied, also one for each head and offset.
_BIAS = re.compile(r"(^|_)bias(es)?(_[a-z0-9]{1,3})?$")
_SCALE = re.compile(
    r"^(layer_)?(scales?|gammas?)$|^(static|dynamic)_(alpha|beta)(_fn)?$|^(alphas?|betas?|lambdas?)$"
    r"|^(bonus|r_k|time_faaaa|lower_bounds)$"
)
# Parameters of PixArt, LTX and Wan, also in their heads: what is added to the scales and shifts of a time.
_MODULATION = re.compile(r"^modulation$|(^|_)scale_shift_table$")
_POSITIONS = re.compile(r"^pe$|^rel_pos(_[hwt])?$|(^|_)ape$")
# Layers whose weights have a row for each distance. A parameter of such a name, without a layer, is a bias.
_DISTANCES = re.compile(r"^rel(ative)?_logits_proj$|(^|_)pos(ition)?(_[xyhwt])?_bias(es)?$")
# Names of output heads: of layers anywhere, and of layers outside of blocks, which give them to hidden layers.
_HEADS = {
    "lm_head",
    "output_head",
    "classifier",
    "unembed",
    "qa_outputs",
    "codec_head",
    "codebooks_head",
    "decoder_pred",
}
_OUTER_HEADS = {"output_layer", "output_projection", "score", "logits", "to_logits", "decoder"}
# Ends of the names of heads outside of blocks: of Inception-ResNet and Inception, of Janus, of a transducer's joint
# network, of VideoMAE, of DiT and Z-Image, of TimesFM.
_ENDS_OF_HEADS = re.compile(
    r"(^|\.)(classif|auxlogits\.fc|vision_head|(joint|decoder)\.head|(all_)?final_layer(\.[\d-]+)?\.linear"
    r"|(horizon_ff_layer|output_projection_(point|quantiles))\.residual_layer)\.weight$"
)
# Heads of MobileBERT and CoCa, whose columns are the vocabulary, by names that RemBERT and CLIP have for hidden layers.
_LONG_HEADS = re.compile(r"(^|\.)(cls\.predictions\.dense\.weight|text_decoder\.text_projection)$")
# Heads that predict further tokens, in numbered blocks: of DeepSeek-V3 and GLM, of others' `mtp` layers, of Medusa.
_FURTHER_HEADS = re.compile(
    r"(^|\.)(shared_head\.(head|output)|mtp(_\w+)?(\.(?!\w*att)\w+)*\.(head|lm_head)|medusa_heads?\.\d+\.\d+)\.weight$"
)
# Layers that score classes or tokens or place boxes, also several of them in a list: anywhere, and outside of blocks.
_SCORES = re.compile(
    r"^(cls|class)_(scores?|logits|predictor|embed|labels_classifier)$|_score_head$|^(lm|audio)_heads$|^heads_dist$"
    r"|^bbox_pred$"
)
_LOGITS = re.compile(r"(?<!pre)_logits$|^logits_")
_ATTENTION = re.compile(r"att(n|ention)$")
_IN_BLOCKS = re.compile(rf"{_ATTENTION.pattern}|^input_\w+_layer$|^tokenizer$")
# What is before a number that does not count a block: nothing, a list of heads, or one of whole networks.
_NO_BLOCKS = re.compile(r"^$|heads?$|^(model|net|network|ensemble|member|critic|actor|q_net|q_network)s?$|^backbone$")
# Weights of torch.nn's recurrent layers, whose `decoder` is hidden.
_RECURRENT = re.compile(r"weight_(ih|hh|hr)(_l\d|$)")
# Names of parts of the whole network, and of layers at its top level.
_TOP_PARTS = (_HEADS | _OUTER_HEADS) - {"decoder"} | {"head", "heads", "head_dist", "aux_classifier"}
# A part at the top whose layers have numbers, as `segmentation_head.0`; those of a larger part of this name are hidden.
# `decoder_order_head` of PP-DocLayout is a list of hidden layers.
_TOP_SEQUENCE = re.compile(r"(?!conv_|decoder_order_)\w+_head$")
# `conv_head` is the last hidden convolution of MobileNet and EfficientNet.
_TOP_LAYER = re.compile(
    r"(output|out|fc|fc_out|proj_out|generator|linear|(final|last)(_(layer|linear|fc|proj))?|(?!conv_).+_head)$"
)
# LoRA factors in PEFT, torchtune, loralib, diffusers and kohya.
_LORA = re.compile(r"(?:^|\.)lora[_.]?(a|b|down|up)(?:\.|$)")
# The part of a factor's name, with its adapter, that replaces the name of the adapted weight.
_FACTOR = re.compile(r"\.lora[_.]?(?:a|b|down|up)(?:\.[^.]+)?(?:\.weight)?$")
# Names of routers of experts. Gated layers such as SwiGLU have a `gate`, too.
ROUTERS = {"router", "gate", "gating", "wg"}
# What is inside one of several experts, or inside a single one, which may also be a network with numbered blocks.
_IN_AN_EXPERT = re.compile(
    r"(^|\.)(\w*experts\.\d+\.|(((shared|local|routed)_)?expert(_?\d+)?|shared_experts)(\.(?!\d)\w+)+$)"
)
# A router has a row for each expert and at most a quarter as many rows as columns: 512 and 2560 in BailingHybrid, 8 and
# 32 in small models for tests. Where the gate of a gated layer has fewer rows than columns, it has about half as many.
_COLUMNS_FOR_A_ROW = 4
# The roles that names show, as far as the colon behind which some name the part that shows it.
ROLES = ("embedding", "output_head", "norm", "router", "state_space", "bias", "scale")


def role_by_name(name: str, shape: tuple[int, ...], is_stack: bool = False) -> Optional[str]:
    """Return the role of a parameter whose name shows an embedding, a head, a norm or a router, else None.

    Embeddings and heads have one row per token, so most rows of their gradient are zero or noise; routers have one row
    per expert. None of them maps one hidden space to another, and only for such maps does a polar factor make sense. A
    LoRA factor has the role of the layer that it adapts; its own shape does not distinguish a router from a `gate`.
    """
    bare = bare_name(name).lower()
    adapted = _FACTOR.sub(".weight", bare)
    parts = [part.lstrip("_") or part for part in adapted.split(".")]
    # The last two are a layer and its weight, or a module and its own parameter.
    layer = parts[-2] if len(parts) > 1 else parts[-1]
    inside = list(dropwhile(_TRUNKS.__contains__, parts)) or [layer]
    at_top = len(inside) < 3
    reads_features = _READS_FEATURES.search(layer) is not None and shape[0] < _LONG * shape[-1]
    if _MODULATION.search(parts[-1]):
        return "scale"
    for part in parts[-2:]:
        if _EMBEDDING.search(part) and not reads_features:
            return f"embedding:{part}"
        if _NORM.search(part):
            return f"norm:{part}"
    table = _table(parts, layer, at_top, shape) or _patch_embedding(parts, at_top, shape)
    if table is not None:
        return f"embedding:{table}"
    if "router" in parts:
        return f"router:{layer}"
    in_sequence = len(inside) == 3 and layer.isdigit() and _TOP_SEQUENCE.match(inside[0])
    in_part = inside[0] in _TOP_PARTS and not any(map(_ATTENTION.search, parts))  # SigLIP's pools in its `head`
    at_ends = in_part or in_sequence or (at_top and _TOP_LAYER.match(layer))
    if (at_ends or _is_head(parts, layer, shape)) and not _RECURRENT.match(parts[-1]):
        return f"output_head:{layer}"
    if layer in ROUTERS and not is_stack and _may_be_router(parts, shape, is_factor=adapted != bare):
        return f"router:{layer}"
    bare_parameter = next((part for part in reversed(parts) if not part.isdigit()), layer)
    if _POSITIONS.search(bare_parameter) or _TABLES.search(bare_parameter) or _is_query(parts, shape):
        return f"embedding:{bare_parameter}"
    if layer is not parts[-1] and _DISTANCES.search(layer):
        return f"embedding:{layer}"
    if parts[-1] in ("a_log", "a_logs"):
        return f"state_space:{parts[-1]}"
    if _BIAS.search(parts[-1]):
        return "bias"
    return "scale" if _SCALE.search(parts[-1]) else None


def _is_head(parts: Sequence[str], layer: str, shape: tuple[int, ...]) -> bool:
    """Whether the layer of a weight is an output head that may be anywhere in the network."""
    place = next((place for place in range(len(parts) - 2, -1, -1) if not parts[place].isdigit()), 0)
    if layer in _HEADS or _SCORES.search(parts[place]) or predicts_further_tokens(".".join(parts)):
        return True
    if layer in _OUTER_HEADS or _LOGITS.search(parts[place]):
        return not _is_in_a_block(parts[:place])
    name = ".".join(parts)
    is_long = shape[-1] >= _LONG * shape[0] and _LONG_HEADS.search(name) is not None
    return is_long or (not _is_in_a_block(parts) and _ENDS_OF_HEADS.search(name) is not None)


def _may_be_router(parts: Sequence[str], shape: tuple[int, ...], is_factor: bool) -> bool:
    """Whether a layer with a router's name may be one, and not the gate of a gated layer, by its place and its shape.

    A layer directly inside a mixture of experts needs fewer rows than columns, others many fewer.
    """
    if _IN_AN_EXPERT.search(".".join(parts[:-1])):
        return False
    around = next((part for part in parts[-3::-1] if part not in ROUTERS and not part.isdigit()), "")
    enough = 1 + shape[0] if "moe" in around else _COLUMNS_FOR_A_ROW * shape[0]
    return is_factor or shape[1] >= enough


def predicts_further_tokens(name: str) -> bool:
    """Whether a name shows a head for tokens after the next one."""
    return _FURTHER_HEADS.search(bare_name(name).lower()) is not None


def _table(parts: Sequence[str], layer: str, at_top: bool, shape: tuple[int, ...]) -> Optional[str]:
    """Return the component of a name that shows a table of embeddings by its place, else None."""
    if len(parts) > 2 and parts[-2].isdigit() and _TABLE_LISTS.search(parts[-3]):
        return parts[-3]
    if at_top and layer in _TOP_TABLES:
        return layer
    # The table of an encoder and a decoder that are a part of the model, such as LED's.
    is_shared = parts[-2:] == ["shared", "weight"] and shape[0] >= _LONG * shape[1]
    return layer if (is_shared or _QUERIES.search(layer)) and not _is_in_a_block(parts) else None


def _is_query(parts: Sequence[str], shape: tuple[int, ...]) -> bool:
    """Whether a parameter without a layer is a learned query for each of several outputs, as CoCa's and Qwen-VL's."""
    is_two = sum(size > 1 for size in shape) == 2
    return parts[-1] == "query" and is_two and shape[-2] != shape[-1] and not _is_in_a_block(parts)


def _is_in_a_block(parts: Sequence[str]) -> bool:
    """Whether a name lies inside an attention, a numbered block, or a part that reads inputs, as TimesFM's."""
    numbered = (before for before, part in zip(("", *parts), parts) if part.isdigit())
    return any(not _NO_BLOCKS.search(before) for before in numbered) or any(map(_IN_BLOCKS.search, parts))


def _patch_embedding(parts: Sequence[str], at_top: bool, shape: tuple[int, ...]) -> Optional[str]:
    """Return the component of a name that shows that the weight projects patches of pixels, else None.

    Without such a name it is the layer, if its kernels are as large as patches and read pixels.
    """
    near = [part for part in parts if not part.isdigit()][-3:]
    is_kernel = len(shape) > 3
    word = next((part for part in near if _PATCHES.search(part) or (at_top and part in _TOP_PATCHES)), None)
    word = next((part for part in parts[-3:-2] if part in _PATCH_LISTS), word)
    if parts[-2:-1] == ["text_proj"]:  # CogVideoX's, which reads a text encoder
        return None
    if word is None and parts[-2:-1] == ["proj"]:  # NaFlexViT's may be a linear layer
        word = next((part for part in parts[-3:-2] if part == "embeds" or (is_kernel and part in _PATCH_KERNELS)), None)
    if word is not None:
        return None if is_kernel and shape[1] > _FEATURES and _is_later_stage(parts, word) else word
    reads_pixels = is_kernel and shape[1] <= _PIXELS and shape[-1] == shape[-2] >= _PATCH_SIDE
    return parts[-2] if reads_pixels and len(parts) > 1 else None


def _is_later_stage(parts: Sequence[str], module: str) -> bool:
    """Whether numbers in a name show that a module of this name is not the first of its kind."""
    place = parts.index(module)
    before, behind = ([int(part) for part in side if part.isdigit()] for side in (parts[:place], parts[place:]))
    itself = re.search(r"\d+$", module)
    return (itself is not None and int(itself.group()) > 1) or any(before) or any(behind)


def lora_factor(name: str) -> Optional[str]:
    """Return `lora:a` or `lora:b` for a factor of a low-rank adapter B A, None for other parameters.

    Muon updates both for every rank from `MIN_SIDE`, whatever their aspect ratio: each maps one hidden space to
    another, one of which has few dimensions. Qu, Huang, Horvath: Can Muon Fine-tune Adam-Pretrained Models?
    (arXiv:2605.10468) train both this way, with the multiplier of `match_rms_adamw`.
    """
    factor = _LORA.search(name.lower())
    return None if factor is None else f"lora:{'a' if factor.group(1) in ('a', 'down') else 'b'}"
