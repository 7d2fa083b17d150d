"""Which rows of which weights belong to which attention head, and how QK-clip scales them.

Rows are runs: neighbours that one power of one gamma scales, where gamma is the factor that brings the largest logit
of a head down to the threshold. Logits are bilinear in query and key weights, so that query rows times gamma**alpha and
key rows times gamma**(1 - alpha) do it. A key head that several query heads share takes the smallest of their gammas.
Of multi-head latent attention the position-free rows scale like that; the rotary key, of which all heads have one,
stays, and the rotary query takes gamma itself. Value rows stay.

Source: Kimi Team, Kimi K2, arXiv:2507.20534, section 2.1 and algorithm 1, which has no shared key heads.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Union

Layer = Union[str, int]
Shapes = Mapping[str, Sequence[int]]

# Modules and parameters of Llama, DeepSeek, timm, Phi and torch. Not here: names like `query_key_value` and `c_attn`,
# under which models have a fused weight's heads in other rows, or in columns.
_ROLES = {
    **dict.fromkeys(("q_proj", "wq", "q_b_proj", "wq_b"), "query"),
    **dict.fromkeys(("k_proj", "wk", "kv_b_proj", "wkv_b"), "key"),
    **dict.fromkeys(("qkv", "qkv_proj", "in_proj_weight"), "fused"),
}
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COUNTS = ("head_dim", "num_kv_heads", *_LATENT)
_KEYS = {"threshold", "alpha", "layers", "q_indices", "k_indices", "is_mla", *_COUNTS}


class ClipSettings(NamedTuple):
    """What `qk_clip` says, as plain values; counts that it does not give are 0."""

    threshold: float
    alpha: float
    head_dim: int
    num_kv_heads: int  # of fused weights; elsewhere their rows tell
    latent: Optional[tuple[int, ...]]  # position-free and rotary rows of a query head, value rows of a key head
    layers: Optional[tuple[tuple[Layer, tuple[Layer, ...]], ...]]
    indices: Optional[tuple[tuple[int, ...], ...]]  # for queries and keys: the head that each logit stands for


class Run(NamedTuple):
    """Neighbouring rows of a weight, scaled by the smallest gamma of `heads` to the power of `exponent`."""

    rows: int
    heads: tuple[int, ...]
    exponent: float


class ClipLayer(NamedTuple):
    """One attention: how many heads have logits, how many those of the layers before, and the runs of each weight."""

    heads: int
    first: int
    weights: dict[str, tuple[Run, ...]]


class ClipPlan(NamedTuple):
    """All layers whose logits can be observed, each under its name and, where that is its alone, its number."""

    threshold: float
    layers: tuple[ClipLayer, ...]
    by_key: dict[Layer, ClipLayer]


def clip_settings(qk_clip: Mapping[str, Any]) -> ClipSettings:
    """Return what `qk_clip` says; it may also be a `clip_config` of the Motif kernel.

    Keys: `threshold` (100), `alpha` (0.5); `head_dim`, the rows of a head, or for latent attention `qk_nope_head_dim`,
    `qk_rope_head_dim` and `v_head_dim`; `num_kv_heads` of fused weights (as many as query heads); `layers`, the names
    or positions of each layer's (query, key) weights or fused one, in a sequence or under the layer's own key (found by
    name); `q_indices`, `k_indices`, the head that each logit stands for (in order); `is_mla`. Raises ValueError or
    TypeError for anything else.
    """
    if not isinstance(qk_clip, Mapping):
        raise TypeError(f"qk_clip must be a dict of settings, got {type(qk_clip).__name__}")
    if not _KEYS >= set(qk_clip):
        raise ValueError(f"qk_clip has no {sorted(set(qk_clip) - _KEYS)}, only {', '.join(sorted(_KEYS))}")
    threshold, alpha = float(qk_clip.get("threshold", 100)), float(qk_clip.get("alpha", 0.5))
    if not 0 < threshold < float("inf") or not 0 <= alpha <= 1:
        raise ValueError(f"qk_clip needs a threshold above 0 and alpha in [0, 1], got {threshold} and {alpha}")
    counts = {key: _count(key, qk_clip.get(key) or 0) for key in _COUNTS}
    latent = tuple(counts[key] for key in _LATENT)
    is_mla = qk_clip.get("is_mla", any(latent))
    if not (all(latent) if is_mla else counts["head_dim"]):
        raise ValueError(f"qk_clip needs {', '.join(_LATENT) if is_mla else 'head_dim'}, got {dict(qk_clip)}")
    return ClipSettings(
        threshold,
        alpha,
        counts["head_dim"],
        counts["num_kv_heads"],
        latent if is_mla else None,
        _plain_layers(qk_clip.get("layers")),
        _plain_indices(qk_clip),
    )


def plan_clip(settings: ClipSettings, shapes: Shapes) -> ClipPlan:
    """Return what `settings` mean for parameters of these names and shapes.

    A weight's bias is scaled as the weight is. A layer that is found by name is called as its module, and by the last
    number in that, unless it shares the number. Raises ValueError for weights that are missing, or no whole heads.
    """
    named = settings.layers is not None
    found = _weights_of(settings.layers, shapes) if named else _found_by_name(shapes)
    names = [name for weights in found.values() for name in weights]
    if len(set(names)) < len(names):
        raise ValueError(f"a weight can be in one layer of qk_clip, {max(names, key=names.count)} is in several")
    layers: list[ClipLayer] = []
    for weights in found.values():
        heads, runs = _fused(settings, *weights, shapes) if len(weights) == 1 else _pair(settings, *weights, shapes)
        biases = {f"{name[:-6]}bias": runs[name] for name in weights if name.endswith("weight")}
        runs.update((bias, rows) for bias, rows in biases.items() if bias in shapes)
        layers.append(ClipLayer(heads, sum(layer.heads for layer in layers), runs))
    by_key = dict(zip(found, layers))
    numbers = [] if named else [_last_number(key) for key in found]
    by_key.update((n, layer) for n, layer in zip(numbers, layers) if n is not None and numbers.count(n) == 1)
    return ClipPlan(settings.threshold, tuple(layers), by_key)


def _pair(settings: ClipSettings, query: str, key: str, shapes: Shapes) -> tuple[int, dict[str, tuple[Run, ...]]]:
    """Return the number of query heads, and the runs of a query and a key weight; latent keys have their values."""
    nope, rope, value = settings.latent or (settings.head_dim, 0, 0)
    heads, keys = _whole_heads(query, shapes, nope + rope), _whole_heads(key, shapes, nope + value)
    of_queries, of_keys = _sharing(settings, query, heads, keys)
    alpha = settings.alpha
    return heads, {
        query: _runs(of_queries, ((nope, alpha), (rope, 1.0))),
        key: _runs(of_keys, ((nope, 1 - alpha), (value, 0.0))),
    }


def _fused(settings: ClipSettings, name: str, shapes: Shapes) -> tuple[int, dict[str, tuple[Run, ...]]]:
    """Return the number of query heads, and the runs of a weight that has all queries, then all keys, then values."""
    rows, alpha = settings.head_dim, settings.alpha
    if settings.latent is not None:
        raise ValueError(f"qk_clip knows latent attention by a query and a key weight, not by one, {name}")
    total = _whole_heads(name, shapes, rows)
    keys = settings.num_kv_heads or total // 3
    if not settings.num_kv_heads and total % 3:
        raise ValueError(f"qk_clip needs num_kv_heads for {name}, which has {total} heads of {rows} rows")
    heads = total - 2 * keys
    of_queries, of_keys = _sharing(settings, name, heads, keys)
    values = Run(keys * rows, (), 0.0)
    return heads, {name: (*_runs(of_queries, ((rows, alpha),)), *_runs(of_keys, ((rows, 1 - alpha),)), values)}


def _sharing(settings: ClipSettings, name: str, heads: int, keys: int) -> tuple[list[tuple[int, ...]], ...]:
    """Return for each query head, and for each key head, the logits that it takes part in."""
    if settings.indices is not None:
        return _standing_for(settings.indices[0], heads, heads), _standing_for(settings.indices[1], keys, heads)
    if keys < 1 or heads < 1 or heads % keys:
        raise ValueError(f"the {heads} query heads of {name} cannot share {keys} key heads evenly")
    shared = heads // keys
    return [(i,) for i in range(heads)], [tuple(range(j, j + shared)) for j in range(0, heads, shared)]


def _standing_for(indices: Sequence[int], heads: int, logits: int) -> list[tuple[int, ...]]:
    if len(indices) > logits or (indices and max(indices) >= heads):
        raise ValueError(f"indices of qk_clip must be at most {logits} heads below {heads}, got {indices}")
    return [tuple(i for i, head in enumerate(indices) if head == j) for j in range(heads)]


def _runs(groups: Sequence[tuple[int, ...]], parts: Sequence[tuple[int, float]]) -> tuple[Run, ...]:
    return tuple(Run(rows, group, exponent) for group in groups for rows, exponent in parts if rows)


def _whole_heads(name: str, shapes: Shapes, rows: int) -> int:
    shape = tuple(shapes[name])
    if len(shape) != 2 or shape[0] % rows:
        raise ValueError(f"qk_clip needs whole heads of {rows} rows in {name}, whose shape is {shape}")
    return shape[0] // rows


def _weights_of(layers: Sequence[tuple[Layer, tuple[Layer, ...]]], shapes: Shapes) -> dict[Layer, list[str]]:
    """Return the names of each layer's weights, for which positions may stand."""
    by_key: dict[Layer, str] = {**dict(enumerate(shapes)), **{name: name for name in shapes}}
    missing = [name for _, names in layers for name in names if name not in by_key]
    if missing:
        raise ValueError(f"qk_clip names weights that are no parameters: {missing}")
    return {key: [by_key[name] for name in names] for key, names in layers}


def _found_by_name(shapes: Shapes) -> dict[Layer, list[str]]:
    """Return the names of the weights of each module that has a fused one, or a query and a key."""
    found: dict[Layer, dict[str, str]] = {}
    for name in (name for name, shape in shapes.items() if len(shape) == 2):
        parts = name.split(".")
        for i in range(len(parts))[-2:]:
            if parts[i] in _ROLES:
                found.setdefault(".".join(parts[:i]), {})[_ROLES[parts[i]]] = name
    for module, roles in found.items():
        if set(roles) not in ({"fused"}, {"query", "key"}):
            raise ValueError(f"qk_clip needs one fused weight, or query and key, in {module!r}, found {roles}")
    if not found:
        raise ValueError("qk_clip finds no query and key weights by their names: give them in its `layers`")
    order = ("fused", "query", "key")
    return {module: [roles[role] for role in order if role in roles] for module, roles in found.items()}


def _last_number(module: Layer) -> Optional[int]:
    return next((int(part) for part in reversed(str(module).split(".")) if part.isdigit()), None)


def _count(key: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} of qk_clip must be a whole number of at least 0, got {value!r}")
    return int(value)


def _plain_indices(qk_clip: Mapping[str, Any]) -> Optional[tuple[tuple[int, ...], ...]]:
    keys = ("q_indices", "k_indices")
    if not any(key in qk_clip for key in keys):
        return None
    return tuple(tuple(_count(key, i) for i in qk_clip.get(key) or ()) for key in keys)


def _plain_layers(layers: Any) -> Optional[tuple[tuple[Layer, tuple[Layer, ...]], ...]]:
    if layers is None:
        return None
    items = layers.items() if isinstance(layers, Mapping) else enumerate(layers)
    plain = tuple((key, (names,) if isinstance(names, (str, int)) else tuple(names)) for key, names in items)
    if not plain or not all(1 <= len(names) <= 2 for _, names in plain):
        raise ValueError(f"layers of qk_clip must each have a fused weight, or query and key, got {layers!r}")
    return plain
