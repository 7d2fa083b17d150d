"""Routing: which parameters Muon updates, which ones AdamW updates, and why."""

from __future__ import annotations

import math
import re
from itertools import dropwhile
from typing import Callable, Iterable, Optional, Sequence, Union

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .checks import check_matrix
from .synonyms import wish_of
from .warned import warn_user

# The reason for parameters that may be stacks of matrices or convolutions.
UNDECIDED = "stack_or_convolution"
# Verdicts on shapes that are not matrices, whether read as stacks or as convolutions.
_NO_MATRIX = ("insufficient_dims", "leading_unit_dims")
MIN_SIDE = 4
MAX_ASPECT = 128.0

# Attributes in which wrappers keep the whole model: DistributedDataParallel, DeepSpeed, torch.compile, Fabric.
MODEL_WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Components that wrappers insert into names; PEFT also adds the name of an adapter after `modules_to_save`.
_WRAPPERS = {*MODEL_WRAPPERS, "base_model", "base_layer", "original_module", "token_adapter"}
_ADAPTER = re.compile(r"\.modules_to_save\.[^.]+")
# Names of the tensors from which torch.nn.utils.parametrize computes a layer's weight.
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original\d*$")
# Containers around the whole network: modules directly inside count as the top level.
_TRUNKS = {"model", "net", "network", "transformer", "backbone"}
# Names of embedding tables: anywhere, or only at the top level, since deeper layers with such names are not tables.
# What projects or transforms embeddings is a hidden layer.
_EMBEDDING = re.compile(
    r"((?<!un)embed|(^|_)emb($|_))(?!\w*(proj|dense|mapping|mapper|transform)\w*$)|^wte$|^wpe$|^lut$|(^|_)table$"
    r"|(^|_)codebooks?$|^relative_attention_bias$|^trainable_tokens_delta$|(^|_)pos(ition(al)?)?_enc(odings?)?$"
)
_TOP_TABLES = {"shared", "tok", "pos"}
# Names of parameters that are tables without a layer: one row for each query or token that a model learns.
_TABLES = re.compile(
    r"^(?!w_|weight_|fast_)(\w+_)?(latents?|latent_query|queries|tokens?|mem(ory|s)?|prompts?)(_\w?\d\w?)?$"
)
# The module that projects patches (torchvision's is `conv_proj`); its weight is at most two modules below.
_PATCHES = re.compile(
    r"(^|_)patch(es)?_(embed(ding|der)?s?\d*(_proj(ection)?)?|conv|proj(ection)?|to_embedding)$|^embed_patches$"
)
_PIXELS = 4  # a convolution of at most so many channels reads pixels,
_PATCH_SIDE = 12  # and patches of them if its kernel has at least this side
_FEATURES = 16  # one of more channels, in a module that is not the first of its kind, reads what a stage has made
_NORM = re.compile(r"norm|^ln(_|\d|$)|^bn\d*$")
# Names of parameters, not of layers: numbers that are added or multiplied, also one for each head and offset.
_BIAS = re.compile(r"(^|_)bias(es)?(_[a-z0-9]{1,3})?$")
_SCALE = re.compile(
    r"^(layer_)?(scales?|gammas?)$|^(static|dynamic)_(alpha|beta)(_fn)?$|^(alphas?|betas?|lambdas?)$"
    r"|^(bonus|r_k|time_faaaa|lower_bounds)$"
)
_POSITIONS = re.compile(r"^pe$|^rel_pos(_[hwt])?$|(^|_)ape$")
# Layers whose weights have a row for each distance. A parameter of such a name, without a layer, is a bias.
_DISTANCES = re.compile(r"^rel(ative)?_logits_proj$|(^|_)pos(ition)?(_[xyhwt])?_bias(es)?$")
# Names of output heads: of layers anywhere, of parts of the whole network, and of layers at its top level.
_HEADS = {"lm_head", "output_head", "output_layer", "output_projection", "classifier", "score", "logits", "to_logits"}
_HEADS |= {"unembed", "decoder", "qa_outputs", "codec_head"}
# Layers that score classes or tokens, also several of them in a list.
_SCORES = re.compile(
    r"^(cls|class)_(scores?|logits|predictor|embed|labels_classifier)$|(?<!pre)_logits$|^logits_|_score_head$"
    r"|^(lm|audio)_heads$|^heads_dist$"
)
# Weights of torch.nn's recurrent layers, whose `decoder` is hidden.
_RECURRENT = re.compile(r"weight_(ih|hh|hr)(_l\d|$)")
_TOP_PARTS = _HEADS - {"decoder"} | {"head", "heads", "head_dist"}
# `conv_head` is the last hidden convolution of MobileNet and EfficientNet.
_TOP_LAYER = re.compile(
    r"(output|out|fc|fc_out|proj_out|generator|linear|(final|last)(_(layer|linear|fc|proj))?|(?!conv_).+_head)$"
)
# LoRA factors in PEFT, torchtune, loralib, diffusers and kohya.
_LORA = re.compile(r"(?:^|\.)lora[_.]?(a|b|down|up)(?:\.|$)")
# The part of a factor's name, with its adapter, that replaces the name of the adapted weight.
_FACTOR = re.compile(r"\.lora[_.]?(?:a|b|down|up)(?:\.[^.]+)?(?:\.weight)?$")
_ROUTERS = {"router", "gate", "gating", "wg"}

IsMuon = Callable[[str, Tensor], Optional[bool]]


def unique_parameters(
    params: Iterable[Union[Tensor, tuple[str, Tensor]]], first: int = 0
) -> list[tuple[list[str], Tensor]]:
    """Return each parameter once, with all its names; unnamed parameters are called `param_<first>` and so on.

    Warns if an unnamed parameter comes twice. Raises TypeError for anything but a tensor or a pair of name and tensor,
    and ValueError for a parameter of a lazy module.
    """
    aliases: dict[Tensor, list[str]] = {}
    unnamed = []
    for i, entry in enumerate(params, first):
        named = isinstance(entry, (tuple, list)) and len(entry) == 2
        name, p = entry if named else (f"param_{i}", entry)
        if not isinstance(name, str) or not isinstance(p, Tensor):
            got = f"{type(entry).__name__} at position {i - first}"
            got += ": write its named_parameters()" if isinstance(entry, nn.Module) else ""
            raise TypeError(f"params must be tensors or (name, tensor) pairs, got {got}")
        if is_lazy(p):
            raise ValueError(
                f"{name} has no shape yet, because its module is lazy: run the model once before its optimizer is made"
            )
        unnamed += [] if named else [p]
        aliases.setdefault(p, []).append(name)
    if len(set(unnamed)) < len(unnamed):
        warn_user("got a parameter group with duplicate parameters: each is optimized once")
    return [(names, p) for p, names in aliases.items()]


def decide(
    names: Sequence[str], p: Tensor, is_muon: Optional[IsMuon] = None, stack: Optional[bool] = False
) -> tuple[str, str]:
    """Return the branch, `muon` or `adamw`, and the reason; `names` are all the names of a tied parameter.

    `is_muon` decides first, then the parameter's attribute `use_muon`, then shapes and names. For a `stack` of matrices
    (E, rows, cols) the shape of one matrix counts. If `stack` is None, the parameter may be a stack or a convolution:
    it goes to AdamW, with the reason `UNDECIDED` if Muon could update it in one of the two readings. Raises TypeError
    for another answer of `is_muon`, and ValueError if Muon is asked to update what is no matrix.
    """
    verdict, reason = None if is_muon is None else is_muon(names[0], p), "is_muon"
    if verdict is None:
        verdict, reason = wish_of(p), "use_muon"
    if verdict not in (True, False, None):
        raise TypeError(f"is_muon must return True, False or None (routing decides), got {verdict!r}")
    if verdict is not None:
        if verdict:
            check_matrix(names[0], p)
        return ("muon" if verdict else "adamw"), reason
    shape = tuple(p.shape)
    readings = {True: (shape[1:],), False: (shape,), None: (shape, shape[1:])}[stack]
    lora = lora_factor(names[0])
    verdicts = [shape_verdict(reading, max_aspect=math.inf if lora else MAX_ASPECT) for reading in readings]
    if verdicts[0][1] in _NO_MATRIX:
        return "adamw", verdicts[0][1]
    for name in names:  # before the sides, so that a long table is reported as a table
        role = role_by_name(name, readings[0], bool(stack))
        if role is not None:
            return "adamw", role
    if not any(suitable for suitable, _ in verdicts):
        return "adamw", verdicts[0][1]
    return ("adamw", UNDECIDED) if stack is None else ("muon", lora or "matrix")


def shape_verdict(shape: tuple[int, ...], min_side: int = MIN_SIDE, max_aspect: float = MAX_ASPECT) -> tuple[bool, str]:
    """Return whether a parameter of this shape is worth orthogonalizing, and the rule that decided.

    Its shorter side must be at least `min_side`, the longer at most `max_aspect` times that. Shapes of more than two
    dimensions count as (out, product of the rest). The rules and their names are those of timm,
    https://github.com/huggingface/pytorch-image-models, timm/optim/muon.py.
    """
    if len(shape) < 2 or sum(size > 1 for size in shape) < 2:
        return False, "insufficient_dims"
    if shape[0] == 1 or shape[1] == 1:
        return False, "leading_unit_dims"
    short, long = sorted((shape[0], math.prod(shape[1:])))
    if short < min_side:
        return False, f"min_dim_too_small:{short}"
    if long / short > max_aspect:
        return False, f"extreme_aspect_ratio:{long / short:.1f}"
    return True, "ok"


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
    for part in parts[-2:]:
        if _EMBEDDING.search(part):
            return f"embedding:{part}"
        if _NORM.search(part):
            return f"norm:{part}"
    table = layer if at_top and layer in _TOP_TABLES else _patch_embedding(parts, at_top, shape)
    if table is not None:
        return f"embedding:{table}"
    scores = _SCORES.search(next((part for part in reversed(parts[:-1]) if not part.isdigit()), ""))
    named = scores or layer in _HEADS or inside[0] in _TOP_PARTS or (at_top and _TOP_LAYER.match(layer))
    if named and not _RECURRENT.match(parts[-1]):
        return f"output_head:{layer}"
    narrow = shape[0] < shape[1] or adapted != bare
    if "router" in parts or (layer in _ROUTERS and narrow and not is_stack):
        return f"router:{layer}"
    bare_parameter = next((part for part in reversed(parts) if not part.isdigit()), layer)
    if _POSITIONS.search(bare_parameter) or _TABLES.search(bare_parameter):
        return f"embedding:{bare_parameter}"
    if layer is not parts[-1] and _DISTANCES.search(layer):
        return f"embedding:{layer}"
    if parts[-1] in ("a_log", "a_logs"):
        return f"state_space:{parts[-1]}"
    if _BIAS.search(parts[-1]):
        return "bias"
    return "scale" if _SCALE.search(parts[-1]) else None


def _patch_embedding(parts: Sequence[str], at_top: bool, shape: tuple[int, ...]) -> Optional[str]:
    """Return the component of a name that shows that the weight projects patches of pixels, else None.

    Without such a name it is the layer, if its kernels are as large as patches and read pixels.
    """
    near = [part for part in parts if not part.isdigit()][-3:]
    said = next((part for part in near if _PATCHES.search(part) or (at_top and part == "conv_proj")), None)
    if said is not None:
        return None if len(shape) > 3 and shape[1] > _FEATURES and _is_later_stage(parts, said) else said
    reads_pixels = len(shape) > 3 and shape[1] <= _PIXELS and shape[-1] == shape[-2] >= _PATCH_SIDE
    return parts[-2] if reads_pixels and len(parts) > 1 else None


def _is_later_stage(parts: Sequence[str], module: str) -> bool:
    """Whether numbers in a name show that a module of this name is not the first of its kind."""
    place = parts.index(module)
    before, behind = ([int(part) for part in some if part.isdigit()] for some in (parts[:place], parts[place:]))
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


def bare_name(name: str) -> str:
    """Return a parameter's name in the model itself, without the components that wrappers add."""
    parts = unparametrized(_ADAPTER.sub("", name)).split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def unparametrized(name: str) -> str:
    """Return the name that a weight had before `torch.nn.utils.parametrize` put other parameters in its place."""
    return _PARAMETRIZED.sub(r"\1\2", name)
