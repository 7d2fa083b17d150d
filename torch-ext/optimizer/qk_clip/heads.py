"""Which rows of which weights belong to which attention head, and how QK-clip scales them.

gamma is the factor that brings the largest logit of a head down to the threshold. Logits are bilinear in query and key
weights, so scaling query rows by gamma**alpha and key rows by gamma**(1 - alpha) does it. A key head that several query
heads share takes the smallest of their gammas. In multi-head latent attention, position-free rows are scaled like that.
The rotary key stays, because all heads share it; the rotary query is scaled by gamma itself. Value rows stay.

A run is a range of neighbouring rows that are scaled by one power of one gamma.

Source: Kimi Team, Kimi K2, arXiv:2507.20534, section 2.1 and algorithm 1, which has no shared key heads.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence

from ..parameters.names import bare_name
from ..parameters.roles import lora_factor
from ..parameters.sequences import is_sequence
from ..parameters.setting_values import flag, plain_number, plain_positive
from .weights import Layer, Layers, Shapes, check_logits_follow, named_weights, plain_layers, weights_by_name

# The weight of queries in `nn.MultiheadAttention(kdim=...)`, which `layers` may name.
_OF_QUERIES = "q_proj_weight"
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COUNTS = ("head_dim", "num_kv_heads", *_LATENT)
_INDICES = ("q_indices", "k_indices")
_KEYS = {"threshold", "alpha", "layers", "is_mla", "by_head", "report", *_INDICES, *_COUNTS}


class ClipSettings(NamedTuple):
    """The settings in `qk_clip` as plain values. Counts that it does not give are 0."""

    threshold: float
    alpha: float
    head_dim: int
    num_kv_heads: int  # of fused weights; otherwise it follows from the key weight's rows
    by_head: bool  # whether fused weights have the rows of each key head together, with its queries and values
    latent: Optional[tuple[int, ...]]  # position-free and rotary rows of a query head, value rows of a key head
    layers: Optional[Layers]
    # For queries and for keys: the head that each logit belongs to, None by default.
    indices: tuple[Optional[tuple[int, ...]], ...]


class Run(NamedTuple):
    """Neighbouring rows of a weight, scaled by the smallest gamma of `heads` to the power of `exponent`."""

    rows: int
    heads: tuple[int, ...]
    exponent: float


Runs = dict[str, tuple[Run, ...]]  # of weights and what is added to their results, by name


class Attention(NamedTuple):
    """One layer whose logits can be observed under any of `keys`."""

    keys: tuple[Layer, ...]
    heads: int  # number of heads that have logits
    first: int  # number of heads in all layers before this one
    weights: Runs
    is_fused: bool  # whether queries, keys and values have one weight


def clip_settings(qk_clip: Mapping[str, Any]) -> ClipSettings:
    """Return the settings in `qk_clip`, which may also be a `clip_config` of the Motif kernel.

    Keys: `threshold` (100); `alpha` (0.5); `head_dim`, the rows of a head, or for latent attention `qk_nope_head_dim`,
    `qk_rope_head_dim` and `v_head_dim`; `num_kv_heads` of fused weights (as many as query heads); `by_head`, whether a
    fused weight has the queries, the key and the values of the first key head, then those of the second one, as in
    GPT-NeoX and in timm's MaxViT (False: all queries, then all keys, then all values); `layers`, the names or positions
    of each layer's (query, key) weights or of its fused one, as a sequence, or as a dict from the layer's key (found by
    name); `q_indices`, the query head that each logit belongs to (in order); `k_indices`, its key head (that of its
    query head); empty ones scale nothing; `is_mla`. Defaults are in parentheses. Positions count the optimizer's
    parameters from 0 in the order in which the user gave them, tied ones once. The key `report` is for the caller.
    Raises ValueError or TypeError for anything else.
    """
    if not isinstance(qk_clip, Mapping):
        raise TypeError(f"qk_clip must be a dict of settings, got {type(qk_clip).__name__}")
    unknown = set(qk_clip) - _KEYS
    if unknown:
        raise ValueError(f"qk_clip has no keys {sorted(map(str, unknown))}, only {', '.join(sorted(_KEYS))}")
    threshold = plain_positive("threshold of qk_clip", qk_clip.get("threshold", 100))
    alpha = plain_number("alpha of qk_clip", qk_clip.get("alpha", 0.5))
    if alpha > 1:
        raise ValueError(f"alpha of qk_clip must be at most 1, got {alpha}")
    counts = {key: _count(key, qk_clip.get(key) or 0) for key in _COUNTS}
    latent = tuple(counts[key] for key in _LATENT)
    is_mla = flag("is_mla of qk_clip", any(latent) if qk_clip.get("is_mla") is None else qk_clip["is_mla"])
    if not (all(latent) if is_mla else counts["head_dim"]):
        raise ValueError(f"qk_clip needs {', '.join(_LATENT) if is_mla else 'head_dim'}, got {dict(qk_clip)}")
    indices = tuple(_heads_of_logits(key, qk_clip.get(key)) for key in _INDICES)
    layers, by_head = qk_clip.get("layers"), flag("by_head of qk_clip", qk_clip.get("by_head", False))
    layers = None if layers is None else plain_layers(layers)
    head_dim, num_kv_heads = counts["head_dim"], counts["num_kv_heads"]
    return ClipSettings(threshold, alpha, head_dim, num_kv_heads, by_head, latent if is_mla else None, layers, indices)


def attentions(settings: ClipSettings, shapes: Shapes) -> list[Attention]:
    """Return the attentions that `settings` describe among parameters with these names and shapes.

    A weight's bias, and the outer factor of its LoRA, are scaled like the weight. A layer that is found by name has its
    module's name as a key, and also the last number in that name, unless several layers have that number. Raises
    ValueError if weights are missing, if a weight does not consist of whole heads, or if logits do not follow it.
    """
    by_keys = weights_by_name(shapes) if settings.layers is None else named_weights(settings.layers, shapes)
    names = [name for weights in by_keys.values() for name in weights]
    if len(set(names)) < len(names):
        raise ValueError(f"each weight may be in one layer of qk_clip, {max(names, key=names.count)} is in several")
    adapters = [name for name in shapes if lora_factor(name) == "lora:b"]
    layers: list[Attention] = []
    first = 0
    for keys, weights in by_keys.items():
        heads, runs = _layer_runs(settings, weights, shapes)
        if settings.latent is None:  # latent attention has norms before these weights
            check_logits_follow(weights, shapes)
        runs.update(_scaled_alike(weights, runs, shapes, adapters))
        layers.append(Attention(keys, heads, first, runs, len(weights) == 1))
        first += heads
    return layers


def _scaled_alike(weights: list[str], runs: Runs, shapes: Shapes, adapters: list[str]) -> Runs:
    """Return the runs of what is added to the results of `weights`: biases, and their outer factors of LoRA.

    Weights of `nn.MultiheadAttention(kdim=...)` have one bias together: of queries, then of keys, then of values.
    """
    alike: Runs = {}
    for name in (each for each in weights if each.endswith("weight")):
        module, bare = name[: -len("weight")], bare_name(name)[: -len("weight")]
        factors = (adapter for adapter in adapters if bare_name(adapter).startswith(bare))
        alike.update(dict.fromkeys((f"{module}bias", *factors), runs[name]))
    if weights[0].endswith(_OF_QUERIES):
        bias, joint = f"{weights[0][: -len(_OF_QUERIES)]}in_proj_bias", [run for name in weights for run in runs[name]]
        alike[bias] = (*joint, Run(shapes.get(bias, (0,))[0] - sum(run.rows for run in joint), (), 0.0))
    alike = {name: rows for name, rows in alike.items() if name in shapes}
    for name, rows in alike.items():
        has, needs = shapes[name][0], sum(run.rows for run in rows)
        if has != needs:
            raise ValueError(f"qk_clip would scale {name}, which has {has} rows, like a weight of {needs} rows")
    return alike


def _layer_runs(settings: ClipSettings, weights: list[str], shapes: Shapes) -> tuple[int, Runs]:
    """Return the number of query heads, and the runs of a layer's query and key weights or of its fused one.

    A fused weight has the rows of all queries, then of all keys, then of all values, or these three for one key head
    after another. The key weight of latent attention includes the values.
    """
    nope, rope, value = settings.latent or (settings.head_dim, 0, 0)
    query, key, is_fused = weights[0], weights[-1], len(weights) == 1
    if settings.by_head and not is_fused:
        raise ValueError(f"by_head of qk_clip is for fused weights, and {query} has the queries alone")
    if not is_fused:
        queries, keys = _whole_heads(query, shapes, nope + rope), _whole_heads(key, shapes, nope + value)
    elif settings.latent is not None:
        raise ValueError(f"qk_clip needs a query and a key weight for latent attention, got one fused weight, {query}")
    else:
        heads = _whole_heads(query, shapes, nope)
        if not settings.num_kv_heads and heads % 3:
            raise ValueError(f"qk_clip needs num_kv_heads for {query}, which has {heads} heads of {nope} rows")
        keys = settings.num_kv_heads or heads // 3
        queries = heads - 2 * keys
    query_logits, key_logits = _logits_of_heads(settings, query, queries, keys)
    query_runs = _runs(query_logits, ((nope, settings.alpha), (rope, 1.0)))
    key_runs = _runs(key_logits, ((nope, 1 - settings.alpha), (value, 0.0)))
    if is_fused and settings.by_head:
        return queries, {query: _by_head(query, [query_runs, key_runs, (Run(nope, (), 0.0),) * keys])}
    if is_fused:
        return queries, {query: (*query_runs, *key_runs, Run(keys * nope, (), 0.0))}
    return queries, {query: query_runs, key: key_runs}


def _by_head(name: str, parts: Sequence[Sequence[Run]]) -> tuple[Run, ...]:
    """Return the runs of queries, keys and values, one for each head, in the order of key heads."""
    queries, keys, _ = map(len, parts)
    lengths = _queries_of_a_key(name, queries, keys), 1, 1
    return tuple(run for i in range(keys) for part, n in zip(parts, lengths) for run in part[i * n : (i + 1) * n])


def _whole_heads(name: str, shapes: Shapes, rows: int) -> int:
    shape = shapes[name]
    if len(shape) != 2 or shape[0] % rows:
        raise ValueError(f"qk_clip needs whole heads of {rows} rows in {name}, whose shape is {shape}")
    return shape[0] // rows


def _logits_of_heads(settings: ClipSettings, name: str, queries: int, keys: int) -> list[list[tuple[int, ...]]]:
    """Return, for each query head and for each key head, the numbers of the logits that it contributes to."""
    of_queries, of_keys = settings.indices
    of_queries = tuple(range(queries)) if of_queries is None else of_queries
    if of_keys is None:
        shared_by = _queries_of_a_key(name, queries, keys)
        of_keys = tuple(head // shared_by for head in of_queries)
    logits_of_heads = []
    for key, head_of_logit, heads in zip(_INDICES, (of_queries, of_keys), (queries, keys)):
        if len(head_of_logit) > queries or (head_of_logit and max(head_of_logit) >= heads):
            raise ValueError(f"{key} of qk_clip must be at most {queries} heads below {heads}, got {head_of_logit}")
        logits: list[list[int]] = [[] for _ in range(heads)]
        for logit, head in enumerate(head_of_logit):
            logits[head].append(logit)
        logits_of_heads.append([tuple(of_head) for of_head in logits])
    return logits_of_heads


def _queries_of_a_key(name: str, queries: int, keys: int) -> int:
    """Return how many query heads share each key head; ValueError unless they do so evenly."""
    if keys < 1 or queries < 1 or queries % keys:
        raise ValueError(f"the {queries} query heads of {name} cannot share {keys} key heads evenly")
    return queries // keys


def _runs(logits_of_heads: Iterable[tuple[int, ...]], parts: Iterable[tuple[int, float]]) -> tuple[Run, ...]:
    """Return the runs of a weight in which each head consists of these parts, (rows, exponent)."""
    return tuple(Run(rows, logits, exponent) for logits in logits_of_heads for rows, exponent in parts if rows)


def _heads_of_logits(key: str, value: Any) -> Optional[tuple[int, ...]]:
    if value is None:
        return None
    if not is_sequence(value):
        raise TypeError(f"{key} of qk_clip must be numbers of heads, got {value!r}")
    return tuple(_count(key, head) for head in value)


def _count(key: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} of qk_clip must be a whole number of at least 0, got {value!r}")
    return int(value)
