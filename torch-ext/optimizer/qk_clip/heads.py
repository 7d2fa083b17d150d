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
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Union

Layer = Union[str, int]
Shapes = Mapping[str, tuple[int, ...]]
Weights = dict[tuple[Layer, ...], list[str]]  # of each layer, by its keys: a query and a key weight, or a fused one

# Modules and parameters of Llama, DeepSeek, timm, Phi and torch. Not here: names like `query_key_value` and `c_attn`,
# under which models have a fused weight's heads in other rows, or in columns.
_ROLES = {
    **dict.fromkeys(("q_proj", "wq", "q_b_proj", "wq_b"), "query"),
    **dict.fromkeys(("k_proj", "wk", "kv_b_proj", "wkv_b"), "key"),
    **dict.fromkeys(("qkv", "qkv_proj", "in_proj_weight"), "fused"),
}
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COUNTS = ("head_dim", "num_kv_heads", *_LATENT)
_INDICES = ("q_indices", "k_indices")
_KEYS = {"threshold", "alpha", "layers", "is_mla", *_INDICES, *_COUNTS}


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


class Attention(NamedTuple):
    """One layer whose logits can be observed under any of `keys`."""

    keys: tuple[Layer, ...]
    heads: int  # that have logits
    first: int  # how many heads the layers before have
    weights: dict[str, tuple[Run, ...]]  # with their biases


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
    unknown = set(qk_clip) - _KEYS - {"report"}  # which is for the caller
    if unknown:
        raise ValueError(f"qk_clip has no {sorted(unknown)}, only {', '.join(sorted(_KEYS))}")
    threshold, alpha = float(qk_clip.get("threshold", 100)), float(qk_clip.get("alpha", 0.5))
    if not 0 < threshold < float("inf") or not 0 <= alpha <= 1:
        raise ValueError(f"qk_clip needs a threshold above 0 and alpha in [0, 1], got {threshold} and {alpha}")
    counts = {key: _count(key, qk_clip.get(key) or 0) for key in _COUNTS}
    latent = tuple(counts[key] for key in _LATENT)
    is_mla = qk_clip.get("is_mla", any(latent))
    if not (all(latent) if is_mla else counts["head_dim"]):
        raise ValueError(f"qk_clip needs {', '.join(_LATENT) if is_mla else 'head_dim'}, got {dict(qk_clip)}")
    indices = None
    if any(key in qk_clip for key in _INDICES):
        indices = tuple(tuple(_count(key, i) for i in qk_clip.get(key) or ()) for key in _INDICES)
    layers = _plain_layers(qk_clip.get("layers"))
    head_dim, num_kv_heads = counts["head_dim"], counts["num_kv_heads"]
    return ClipSettings(threshold, alpha, head_dim, num_kv_heads, latent if is_mla else None, layers, indices)


def attentions(settings: ClipSettings, shapes: Shapes) -> list[Attention]:
    """Return the attentions that `settings` mean among parameters of these names and shapes.

    A weight's bias is scaled as the weight is. A layer that is found by name is called as its module, and by the last
    number in that, unless it shares the number. Raises ValueError for weights that are missing, or no whole heads.
    """
    found = _found_by_name(shapes) if settings.layers is None else _named_weights(settings.layers, shapes)
    names = [name for weights in found.values() for name in weights]
    if len(set(names)) < len(names):
        raise ValueError(f"a weight can be in one layer of qk_clip, {max(names, key=names.count)} is in several")
    layers: list[Attention] = []
    first = 0
    for keys, weights in found.items():
        heads, runs = _layer_runs(settings, weights, shapes)
        biases = {f"{name[:-6]}bias": runs[name] for name in weights if name.endswith("weight")}
        runs.update((bias, rows) for bias, rows in biases.items() if bias in shapes)
        layers.append(Attention(keys, heads, first, runs))
        first += heads
    return layers


def _layer_runs(settings: ClipSettings, weights: list[str], shapes: Shapes) -> tuple[int, dict[str, tuple[Run, ...]]]:
    """Return the number of query heads, and the runs of a layer's query and key weights or of its fused one.

    A fused weight has all queries, then all keys, then all values; the key weight of latent attention has the values.
    """
    nope, rope, value = settings.latent or (settings.head_dim, 0, 0)
    query, key, is_fused = weights[0], weights[-1], len(weights) == 1
    if not is_fused:
        queries, keys = _whole_heads(query, shapes, nope + rope), _whole_heads(key, shapes, nope + value)
    elif settings.latent is not None:
        raise ValueError(f"qk_clip knows latent attention by a query and a key weight, not by one, {query}")
    else:
        heads = _whole_heads(query, shapes, nope)
        if not settings.num_kv_heads and heads % 3:
            raise ValueError(f"qk_clip needs num_kv_heads for {query}, which has {heads} heads of {nope} rows")
        keys = settings.num_kv_heads or heads // 3
        queries = heads - 2 * keys
    query_logits, key_logits = _logits_of_heads(settings, query, queries, keys)
    query_runs = _runs(query_logits, ((nope, settings.alpha), (rope, 1.0)))
    key_runs = _runs(key_logits, ((nope, 1 - settings.alpha), (value, 0.0)))
    if is_fused:
        return queries, {query: (*query_runs, *key_runs, Run(keys * nope, (), 0.0))}
    return queries, {query: query_runs, key: key_runs}


def _whole_heads(name: str, shapes: Shapes, rows: int) -> int:
    shape = shapes[name]
    if len(shape) != 2 or shape[0] % rows:
        raise ValueError(f"qk_clip needs whole heads of {rows} rows in {name}, whose shape is {shape}")
    return shape[0] // rows


def _logits_of_heads(settings: ClipSettings, name: str, queries: int, keys: int) -> list[list[tuple[int, ...]]]:
    """Return for each query head, and for each key head, the logits that it takes part in."""
    indices = settings.indices
    if indices is None:
        if keys < 1 or queries < 1 or queries % keys:
            raise ValueError(f"the {queries} query heads of {name} cannot share {keys} key heads evenly")
        shared = queries // keys
        indices = tuple(range(queries)), tuple(i // shared for i in range(queries))
    logits_of_heads = []
    for head_of_logit, heads in zip(indices, (queries, keys)):
        if len(head_of_logit) > queries or (head_of_logit and max(head_of_logit) >= heads):
            raise ValueError(f"indices of qk_clip must be at most {queries} heads below {heads}, got {head_of_logit}")
        logits: list[list[int]] = [[] for _ in range(heads)]
        for logit, head in enumerate(head_of_logit):
            logits[head].append(logit)
        logits_of_heads.append([tuple(of_head) for of_head in logits])
    return logits_of_heads


def _runs(logits_of_heads: Iterable[tuple[int, ...]], parts: Iterable[tuple[int, float]]) -> tuple[Run, ...]:
    """Return the runs of a weight whose heads each consist of these parts (rows, exponent)."""
    return tuple(Run(rows, logits, exponent) for logits in logits_of_heads for rows, exponent in parts if rows)


def _named_weights(layers: Iterable[tuple[Layer, tuple[Layer, ...]]], shapes: Shapes) -> Weights:
    """Return the names of the given weights, for which positions may stand."""
    by_key: dict[Layer, str] = {**dict(enumerate(shapes)), **{name: name for name in shapes}}
    missing = [name for _, names in layers for name in names if name not in by_key]
    if missing:
        raise ValueError(f"qk_clip names weights that are no parameters: {missing}")
    return {(layer,): [by_key[name] for name in names] for layer, names in layers}


def _found_by_name(shapes: Shapes) -> Weights:
    """Return the names of the weights of each module that has a fused one, or a query and a key."""
    modules: dict[str, dict[str, str]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        for i in range(len(parts))[-2:]:
            if len(shape) == 2 and parts[i] in _ROLES:
                modules.setdefault(".".join(parts[:i]), {})[_ROLES[parts[i]]] = name
    if not modules:
        raise ValueError("qk_clip finds no query and key weights by their names: give them in its `layers`")
    numbers = {module: [int(part) for part in module.split(".") if part.isdigit()][-1:] for module in modules}
    found: Weights = {}
    for module, roles in modules.items():
        if set(roles) not in ({"fused"}, {"query", "key"}):
            raise ValueError(f"qk_clip needs one fused weight, or query and key, in {module!r}, found {roles}")
        is_alone = list(numbers.values()).count(numbers[module]) == 1
        keys = (module, *numbers[module]) if is_alone else (module,)
        found[keys] = [roles[role] for role in ("fused", "query", "key") if role in roles]
    return found


def _count(key: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} of qk_clip must be a whole number of at least 0, got {value!r}")
    return int(value)


def _plain_layers(layers: Any) -> Optional[tuple[tuple[Layer, tuple[Layer, ...]], ...]]:
    if layers is None:
        return None
    items = layers.items() if isinstance(layers, Mapping) else enumerate(layers)
    plain = tuple((key, (names,) if isinstance(names, (str, int)) else tuple(names)) for key, names in items)
    if not plain or not all(1 <= len(names) <= 2 for _, names in plain):
        raise ValueError(f"layers of qk_clip must each have a fused weight, or query and key, got {layers!r}")
    return plain
