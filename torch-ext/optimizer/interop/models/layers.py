"""The parts of a model's weight (heads, fused projections, gate and up), found by names and by sizes.

Names are those of transformers, torch, timm and nanoGPT; no library is imported for this.
"""

from __future__ import annotations

import re
from numbers import Number
from typing import Any, NamedTuple, Optional, Sequence

from torch import Tensor, nn

from ...parameters.matrices import EXPERT_KEYS, is_stack
from ...parameters.names import bare_name
from ...parameters.roles import NORM, lora_factor
from ...parameters.setting_values import flag
from .attention import FUSED, ROLE_OF, Parts, attention_parts, leaf_of, rows_by_role, states_heads
from .attributes import attribute
from .output_heads import layer_inside, without_wrappers
from .weighted_layers import CONVOLUTION, by_group, has_rows_of_outputs, widths_of

_GATE_AND_UP = "gate and up"
_GATED = ("gate_up_proj", "gate_up", "gate_and_up_proj", "w12", "w13", "Wi")
# The rows of gate and up have another order in each version of torchtitan.
_ORDER_UNKNOWN = {"w13"}
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_NORM_CLASS = re.compile(NORM)
_DOWN = ("down_proj", "down", "w2")
# Classes of gated layers whose weight has a name of any layer, such as timm's GluMlp, diffusers' GEGLU, Moshi's and
# Moonshine's, and of activations beside such a weight.
_GATED_CLASS = re.compile(r"(Glu|GLU(?!E([A-Z]|$))|GatedLinearUnit|GatingMLP)(?![a-z])|^Moonshine\w*DecoderMLP$")
# Layers whose next ones read half as much as they write: of Granite's shared experts, and of Conformers.
_GATED_LAYERS = ("input_linear", "pointwise_conv1", "pointwise_lin1")
_RECURRENT = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell)
# Weights of state space models, such as Mamba, whose modules have a parameter of this name.
_STATE_SPACE, _DECAYS = ("in_proj", "x_proj"), "A_log"
# Layers that make shifts, scales and gates of a condition in diffusion transformers such as DiT and Flux, by a module's
# name, or by its class in diffusers. FocalNet's `modulation.f` is something else.
_MODULATION = re.compile(r"(^|\.)(adaln(_modulation|_proj)|modulation\.lin|(img|txt)_mod|time(_mod)?_proj)\.")
_MODULATION_CLASS = re.compile(r"Ada(Layer)?(Norm|LN)|NormZero|^(?!Focal)\w*Modulation$")


class Cutting(NamedTuple):
    """How to cut weights: attention by head or only into queries, keys and values; gate and up apart or not.

    `config`, an object or a mapping, which may be None, has sizes that no module has.
    """

    config: Any
    heads: bool
    gate_up: bool


class Cut(NamedTuple):
    """The role of a weight, the group settings that cut it accordingly, and a remark on missing information."""

    role: str
    settings: dict[str, Any]
    remark: Optional[str] = None
    left_open: tuple[str, ...] = ()  # the settings that the remark asks for


def check_cutting(cutting: Cutting) -> None:
    """Raise TypeError unless flags are flags, and the config, if there is one, may have sizes."""
    flag("heads", cutting.heads)
    flag("gate_up", cutting.gate_up)
    if isinstance(cutting.config, (Number, str, bytes, list, tuple, set)):
        raise TypeError(f"config must be an object or a dict with sizes, or None, got {cutting.config!r}")


def is_norm(owner: nn.Module) -> bool:
    """Whether a module is a norm, by its class or by the name of its class."""
    return isinstance(owner, _NORMS) or _NORM_CLASS.search(type(owner).__name__.lower()) is not None


def stack_in(name: str, p: Tensor, owner: nn.Module) -> Optional[bool]:
    """Return whether the parameter of `owner` is a stack of matrices, not a convolution; None if nothing shows it."""
    if p.ndim < 3 or isinstance(owner, CONVOLUTION) or is_stack(name, 3, EXPERT_KEYS) is False:
        return False  # also by `conv` in the name
    known = _is_of_experts(name, p, owner) or _is_pair(name, p, owner)
    return True if known else is_stack(name, p.ndim, EXPERT_KEYS)


def _is_of_experts(name: str, p: Tensor, owner: nn.Module) -> bool:
    """Whether a parameter is a stack of experts: by its name, or by its module's class or number of experts."""
    counts = [attribute(owner, key) for key in ("num_experts", "n_experts", "num_local_experts")]
    by_module = "expert" in type(owner).__name__.lower() or p.size(0) in counts
    return by_module or bool(is_stack(name, p.ndim, EXPERT_KEYS))


def _is_pair(name: str, p: Tensor, owner: nn.Module) -> bool:
    """Whether gate and up of a dense layer are (2, rows, cols), as in torchtitan."""
    is_beside = p.ndim == 3 and p.size(0) == 2 and leaf_of(name) in _ORDER_UNKNOWN
    return is_beside and not _is_of_experts(name, p, owner)


def cut_of(name: str, p: Tensor, owners: Sequence[nn.Module], cutting: Cutting) -> Cut:
    """Return the parts of a matrix or of a stack; `owners` are the modules around it, the innermost first."""
    stack = stack_in(name, p, owners[0])
    settings: dict[str, Any] = {} if p.ndim < 3 or stack is None else {"stacked": stack}
    is_kernel = p.ndim > 2 and not stack
    if is_kernel and not has_rows_of_outputs(p, owners[0]):
        return Cut("convolution", {**settings, **by_group(p, owners[0])})
    is_pair = _is_pair(name, p, owners[0])
    is_conv1d = type(owners[0]).__name__ == "Conv1D" and not is_kernel  # transformers', a linear layer
    transposed = _is_transposed(owners[0]) if stack and not is_pair else is_conv1d
    if transposed:
        settings["transposed"] = True
    role, (parts, remark) = _parts(name, p, 0 if is_kernel else -1 if transposed else -2, owners, cutting)
    role = "convolution" if is_kernel and role == "matrix" else role
    left_open = () if remark is None else ("split_rows",)
    remark = None if remark is None else f"are not cut, because {remark}"
    if transposed is None:
        left_open = ("transposed",) if remark is None and parts is None else ("split_rows", "transposed")
        less, also = ("", "") if parts is None else ("not cut, and ", " and split_rows")
        parts = None
        lies = f"are {less}assumed to be (E, out, in), because no sizes show it: give transposed{also} in patterns"
        remark = lies if remark is None else f"{remark}, and {lies}"
    if parts is not None and len(parts) > 1:
        settings["split_rows"] = parts
    if stack and not is_pair:
        role = "experts" if role == "matrix" else f"experts: {role}"
    return Cut(role, settings, remark, left_open)


def _is_transposed(experts: nn.Module) -> Optional[bool]:
    """Return whether a module's stacks are (E, in, out), by its attribute or by the sizes of its projections, or None.

    The fused gate and up projection has twice as many outputs as the down projection has inputs.
    """
    stated = attribute(experts, "is_transposed")
    if isinstance(stated, bool):
        return stated
    stacks = {name: p.shape for name, p in experts.named_parameters(recurse=False) if p.ndim == 3}
    up = next((shape for name, shape in stacks.items() if name in _GATED), None)
    down = next((shape for name, shape in stacks.items() if name in _DOWN), None)
    if up is None or down is None:
        return None
    (_, rows, cols), (_, down_rows, down_cols) = up, down
    plain, transposed = (rows, cols) == (2 * down_cols, down_rows), (cols, rows) == (2 * down_rows, down_cols)
    return transposed if plain != transposed else None


def _parts(name: str, p: Tensor, axis: int, owners: Sequence[nn.Module], cutting: Cutting) -> tuple[str, Parts]:
    """Return the role and the parts of a weight whose rows lie along `axis`, which is 0 for a convolution."""
    leaf, rows, columns = leaf_of(name), p.size(axis), p.size(-3 - axis if axis else 1)
    if leaf in _GATED:
        apart = p.ndim > 3 or _is_pair(name, p, owners[0])
        return (_GATE_AND_UP, (None, None)) if apart else _gate_and_up(leaf, rows, owners[0], cutting.gate_up)
    layers, role = without_wrappers(owners), ROLE_OF.get(leaf)
    in_layer = len(layers) > 1 and bare_name(name).endswith(f"{leaf}.weight")  # a wrapper may be the whole model
    attention = layers[1] if in_layer else layers[0]
    if role is None or not (role == FUSED or _is_attention(name, layers, attention)):
        return _of_a_layer(name, rows, columns, layers, cutting.gate_up)
    around, rows_of_roles = owners[owners.index(attention) :], {**rows_by_role(attention, axis), role: rows}
    if axis == 0:  # only the attention itself counts, and libraries differ in the order of a fused convolution's rows
        return role, attention_parts(leaf, rows_of_roles, columns, around[:1], None, cutting.heads or role == FUSED)
    return role, attention_parts(leaf, rows_of_roles, columns, around, cutting.config, cutting.heads)


def _gate_and_up(leaf: str, rows: int, owner: nn.Module, gate_up: bool) -> tuple[str, Parts]:
    if getattr(owner, "has_gate", True) is False:
        return "matrix", (None, None)
    if leaf in _ORDER_UNKNOWN and not hasattr(owner, "is_concatenated"):
        remark = f"libraries differ in the order of the rows of {leaf}: if the gate is the first half"
        return _GATE_AND_UP, (None, f"{remark}, give split_rows in patterns" if gate_up else None)
    # In gpt-oss the rows of gate and up alternate; its class has an attribute for this only from transformers 5 on.
    if getattr(owner, "is_concatenated", not type(owner).__name__.startswith("GptOss")) is False:
        return _GATE_AND_UP, (None, "their rows alternate")
    return _halves(rows, gate_up)


def _of_a_layer(name: str, rows: int, columns: int, layers: Sequence[nn.Module], gate_up: bool) -> tuple[str, Parts]:
    """Return the role and the parts of a weight whose name shows neither, by the layers beside it.

    A gated layer writes a gate and what it gates, of which the next layer reads the product, half as wide.
    """
    remark = _several_in_one(name, rows // columns, layers)
    kind = next((each for each in (nn.Linear, CONVOLUTION) if isinstance(layers[0], each)), None)
    if remark is not None or len(layers) < 2 or kind is None:
        return "matrix", (None, remark)
    beside = list(layers[1].children())
    activations = (each for each in beside if next(each.parameters(), None) is None)
    is_gated, *others = (_GATED_CLASS.search(type(each).__name__) is not None for each in (layers[1], *activations))
    alike = [layer for layer in map(layer_inside, beside) if isinstance(layer, kind)]
    later = alike[alike.index(layers[0]) + 1 :] if layers[0] in alike else []
    following = [layer for layer in later if attribute(layer, "groups") != rows]  # else each channel has its kernel
    if not following:
        is_alone = is_gated and kind is nn.Linear and len(alike) == 1
        return _halves(rows, gate_up) if is_alone else ("matrix", (None, None))
    read, written = widths_of(following[0]) or (0, 0)
    # Where a separate gate is beside it, the next layer reads what this one does, and writes as much.
    writes_two = rows == 2 * read and (read, written) != (columns, rows)
    is_read_whole = rows in (written, *(widths[0] for widths in map(widths_of, beside) if widths is not None))
    if writes_two and (is_gated or leaf_of(name) in _GATED_LAYERS or (any(others) and not is_read_whole)):
        return _halves(rows, gate_up)
    if kind is nn.Linear and writes_two and rows > columns != read and not is_read_whole:
        remark = "the next layer reads half as many features as they write: if these are a gate and what it gates, give"
        return "matrix", (None, f"{remark} split_rows in patterns")
    return "matrix", (None, None)


def _halves(rows: int, gate_up: bool) -> tuple[str, Parts]:
    """Return gate and up as halves of the rows, unless they are to stay together or cannot be halves."""
    return _GATE_AND_UP, ((rows // 2, rows // 2) if gate_up and rows % 2 == 0 else None, None)


def _several_in_one(name: str, squares: int, layers: Sequence[nn.Module]) -> Optional[str]:
    """Return why a weight that consists of several matrices is not cut; None if nothing shows that it does.

    `squares` is how many square matrices its rows have room for.
    """
    leaf = leaf_of(name)
    if isinstance(layers[0], _RECURRENT) and leaf.startswith(("weight_ih", "weight_hh")):
        return "gates of recurrent layers have not been tried apart: to cut them give split_rows in patterns"
    if leaf in _STATE_SPACE and any(hasattr(layer, _DECAYS) for layer in layers[:2]):
        order = "state space models differ in the order of their rows (gate, x, B, C, time steps)"
        return f"{order}: to cut them give split_rows in patterns"
    if squares > 1 and "qkv" in leaf.lower():  # such as Flux 2's `to_qkv_mlp_proj`
        return "their name says queries, keys and values, but not the order of the rows: give split_rows in patterns"
    out = attribute(layers[1], "out_proj") if leaf == "in_proj" and len(layers) > 1 else None
    read, written = attribute(out, "in_features"), attribute(layers[0], "out_features")
    if squares > 1 and read is not None and squares * read == written:  # such as LFM2's short convolution
        return f"they write {squares} times as many features as out_proj reads: give split_rows in patterns"
    by_class = any(_MODULATION_CLASS.search(type(layer).__name__) for layer in layers[:2])
    if squares > 1 and not lora_factor(name) and (by_class or _MODULATION.search(bare_name(name).lower())):
        return "shifts, scales and gates have not been tried apart: to cut them give split_rows in patterns"
    return None


def _is_attention(name: str, layers: Sequence[nn.Module], module: nn.Module) -> bool:
    """Whether a weight is in an attention: by a name, a class, or heads; `key` and `v` occur elsewhere too.

    `layers` are the modules around it, and `module` the one that may be an attention. A convolution needs heads.
    """
    names = f"{name} {' '.join(type(layer).__name__ for layer in layers[:2])}".lower()
    is_named = "attn" in names or "attention" in names
    if not states_heads(module):
        return is_named and not isinstance(layers[0], CONVOLUTION)
    near = (each for each, _ in module.named_parameters() if bare_name(each).count(".") < 2)  # not of parts inside
    return is_named or {"queries", "keys"} <= {ROLE_OF.get(leaf_of(each)) for each in near}
