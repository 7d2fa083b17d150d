"""Which weights make queries and keys: those that the user names, or those whose names show it."""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any, Iterable, Mapping, Sequence, Union

from ..parameters.names import bare_name
from ..parameters.roles import lora_factor
from ..parameters.sequences import is_sequence

Layer = Union[str, int]
Layers = tuple[tuple[Layer, tuple[Layer, ...]], ...]  # each layer's key, and its weights by names or positions
Shapes = Mapping[str, tuple[int, ...]]
Weights = dict[tuple[Layer, ...], list[str]]  # layer's keys -> names: a query and a key weight, or a fused one

# Names of modules and parameters in Llama, DeepSeek, timm, Phi and torch. Names like `query_key_value` and `c_attn` are
# left out on purpose: models that use them order the heads of a fused weight differently, or have them in columns.
_ROLES = {
    **dict.fromkeys(("q_proj", "wq", "q_b_proj", "wq_b"), "query"),
    **dict.fromkeys(("k_proj", "wk", "kv_b_proj", "wkv_b"), "key"),
    **dict.fromkeys(("qkv", "qkv_proj", "in_proj_weight"), "fused"),
}
# Modules beside them that bring queries or keys to one size, so that the size of their weights does not matter, by what
# names have after that of the attention.
_NORMED, _NORM = "(q|k|qk|query|key|queries|keys)", "((layer_?|rms_?)?norm|normalization|ln|rms)s?"
# What such a norm may be in, as in norm.query_norm.scale of Flux. Another module there may be another attention.
_AROUND = r"(((qk_?)?norms?|((self|inner|core)_?)?(attn|attention))\.)?"
_NAMED = rf"{_AROUND}(\w+_)?({_NORMED}_?{_NORM}|{_NORM}[._]?{_NORMED})(_layer|\d+)?(_weight|_scale)?(\.|$)"
_NORMS = re.compile(_NAMED, re.IGNORECASE)


def plain_layers(layers: Any) -> Layers:
    """Return `layers` as tuples; TypeError or ValueError unless each has a key and one or two names or positions."""
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise TypeError(f"layers of qk_clip must be a sequence or a dict of layers, got {layers!r}")
    plain = []
    for key, weights in layers.items() if isinstance(layers, Mapping) else enumerate(layers):
        if not _is_layer(key):
            raise TypeError(f"layers of qk_clip must have names or numbers as keys, got {key!r}")
        names = weights if is_sequence(weights) else (weights,)
        if not all(map(_is_layer, names)):
            raise TypeError(f"layers of qk_clip must each have one or two names or positions, got {weights!r}")
        plain.append((key, tuple(names)))
    if not plain or not all(1 <= len(names) <= 2 for _, names in plain):
        raise ValueError(f"layers of qk_clip must each have a fused weight, or query and key, got {layers!r}")
    return tuple(plain)


def _is_layer(value: Any) -> bool:
    return isinstance(value, (str, Integral)) and not isinstance(value, bool)


def without_positions(layers: Layers, names: Sequence[str]) -> Layers:
    """Return `layers` with a name in place of each position, which counts `names`.

    Raises ValueError for a position that is not in them.
    """
    positions = [weight for _, weights in layers for weight in weights if isinstance(weight, Integral)]
    outside = [position for position in positions if not 0 <= position < len(names)]
    if outside:
        raise ValueError(
            f"layers of qk_clip have the position {outside[0]}, and {len(names)} parameters were given, counted from 0"
        )
    return tuple(
        (layer, tuple(weight if isinstance(weight, str) else names[weight] for weight in weights))
        for layer, weights in layers
    )


def named_weights(layers: Layers, shapes: Shapes) -> Weights:
    """Return the names of the weights of `layers`, which are in `shapes`."""
    missing = [name for _, names in layers for name in names if name not in shapes]
    if missing:
        raise ValueError(f"qk_clip names weights that are not parameters: {missing}")
    return {(layer,): list(names) for layer, names in layers}


def weights_by_name(shapes: Shapes) -> Weights:
    """Return, for each module that has them, the names of its fused weight or of its query and key weights."""
    candidates: dict[tuple[str, str], list[str]] = {}
    for name, shape in shapes.items():
        if len(shape) != 2 or lora_factor(name) or "parametrizations" in name:  # these are not the weight itself
            continue
        parts = bare_name(name).split(".")
        for i in range(len(parts))[-2:]:
            if parts[i] in _ROLES:
                candidates.setdefault((".".join(parts[:i]), _ROLES[parts[i]]), []).append(name)
    modules: dict[str, dict[str, str]] = {}
    for (module, role), names in candidates.items():
        weights = [name for name in names if name.endswith("weight")]  # others may be its scale or mask
        if len(weights) > 1:
            raise ValueError(f"qk_clip takes {' or '.join(weights)} as {role}: name the right one in its `layers`")
        modules.setdefault(module, {})[role] = (weights or names)[-1]
    if not modules:
        raise ValueError("qk_clip finds no query and key weights by their names: give them in its `layers`")
    numbers = {module: [int(part) for part in module.split(".") if part.isdigit()][-1:] for module in modules}
    by_keys: Weights = {}
    for module, roles in modules.items():
        if set(roles) not in ({"fused"}, {"query", "key"}):
            raise ValueError(f"qk_clip needs one fused weight, or query and key, in {module!r}, found {roles}")
        is_alone = list(numbers.values()).count(numbers[module]) == 1
        names = [roles[role] for role in ("fused", "query", "key") if role in roles]
        keys = dict.fromkeys((module, _module_of(names[0]), *(numbers[module] if is_alone else ())))
        by_keys[tuple(keys)] = names
    return by_keys


def check_logits_follow(weights: Sequence[str], shapes: Shapes) -> None:
    """Raise ValueError if something keeps the logits of these weights where they are.

    That is a norm of queries or keys, or DoRA's magnitudes: the logits would stay, and the rows would shrink at every
    step. torch's `bias_k` is a key beside those that the weights make, which nothing scales. A norm of what the weights
    read, which has as many elements as they have columns and not as many as rows, does no harm. Values too are made
    from what a fused weight reads, so that a norm of queries or keys is not one of that.
    """
    layers = [re.sub(r"\.weight$", "", bare_name(name)).split(".") for name in weights]
    attention = [first for first, *others in zip(*(layer[:-1] for layer in layers)) if all(x == first for x in others)]
    rows, columns = shapes[weights[0]]
    for name, shape in shapes.items():
        parts = bare_name(name).split(".")
        below = ".".join(parts[len(attention) :]) if parts[: len(attention)] == attention else ""
        is_of_input = len(weights) > 1 and shape == (columns,) != (rows,)
        if (_NORMS.match(below) and not is_of_input) or below == "bias_k":
            raise ValueError(
                f"qk_clip cannot bring down the logits of {weights[0]}, because of {name}: leave qk_clip out"
            )
        if "lora_magnitude_vector" in parts and any(parts[: len(layer)] == layer for layer in layers):
            raise ValueError(
                f"qk_clip cannot bring down the logits of {weights[0]}, because {name} keeps the size of its rows: "
                "leave qk_clip out"
            )


def _module_of(name: str) -> str:
    """Return the name of a weight's attention as the model has it, with the components of wrappers."""
    return name.rpartition("." + next(part for part in name.split(".") if part in _ROLES))[0]
