"""The rows of an attention's weight that belong together: heads, or the queries, keys and values of a fused weight.

Sizes are attributes of the modules around a weight, from the attention outwards, or of their configs (or keys, if a
config is a dict), with the names of transformers, torch, timm and nanoGPT. A head size that nothing states follows from
the number of heads and the rows of the weight and of those beside it; a weight whose rows allow two answers is not cut.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ...parameters.names import bare_name
from ...parameters.routing import MIN_SIDE
from .attributes import attribute

# These weights can only be cut by head. In the first one the query, key and value rows of each head, or block of heads,
# are together; the names of the others do not tell the order of rows.
BY_HEAD = {"query_key_value", "in_proj_qkv", "in_proj_qkvz", "kv", "kv_proj", "to_kv", "att_proj"}
# So it is in transformers' classes of these names, in GPTBigCode's unless all heads share one key, in attentions of
# timm's MaxViT, whose attribute `head_first` says so, and in torchtitan's `FusedQKVLinear`, which has `heads_per_kv`.
_BY_HEAD_CLASSES = ("CodeGen", "GPTBigCode", "MiniMaxLightning")
FUSED = "queries, keys and values"
_ROLES = {
    "queries": {"q", "q_proj", "query", "query_proj", "wq", "to_q", "q_lin", "q_attn", "q_b_proj", "q_proj_weight"},
    "keys": {"k", "k_proj", "key", "key_proj", "wk", "to_k", "k_lin", "k_proj_weight"},
    "values": {"v", "v_proj", "value", "value_proj", "wv", "to_v", "v_lin", "v_proj_weight"},
    FUSED: {"qkv", "qkv_proj", "c_attn", "wqkv", "Wqkv", "to_qkv", "in_proj_weight", *BY_HEAD},
    "latent keys and values": {"kv_b_proj"},
    "latent and rotary key": {"kv_a_proj_with_mqa"},
    # Of Qwen3.5: a gate for each row of the values. Qwen3-Next has it inside of `in_proj_qkvz`.
    "gates of values": {"in_proj_z"},
}
ROLE_OF = {leaf: role for role, leaves in _ROLES.items() for leaf in leaves}
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_kv", "dim_head", "head_size")
_KEY_DIM, _VALUE_DIM = ("head_k_dim",), ("v_head_dim", "head_v_dim")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_query_groups")
_WIDTHS = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim", "dim_out")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_UNFIT = "sizes do not show how many rows each of its heads has: give split_rows in patterns"

# The row counts of a weight's parts (None for one part), and the reason if it is not cut but could be.
Parts = Tuple[Optional[Tuple[int, ...]], Optional[str]]
# The rows of the weights of an attention, by role.
Rows = Mapping[str, int]


class _Sizes(NamedTuple):
    """What modules and configs state about the heads of a weight."""

    head: Optional[int] = None  # rows of a head
    value: Optional[int] = None  # rows of a head's values
    heads: Optional[int] = None  # number of heads
    key_heads: Optional[int] = None  # number of heads of keys
    widths: tuple[int, ...] = ()  # rows that all heads together may have
    counted_by_attention: bool = False  # whether the attention itself has the number of heads
    latent: Optional[tuple[int, ...]] = None  # position-free, rotary and value rows of latent attention


def attention_parts(
    leaf: str, rows: Rows, columns: int, around: Sequence[nn.Module], config: Any, by_head: bool
) -> Parts:
    """Return the parts of the weight called `leaf`; `around` are the attention and the modules around it."""
    role = ROLE_OF[leaf]
    sizes = _sizes(role, around, config)
    if sizes.latent is not None and role != FUSED:
        return _latent_parts(role, rows[role], sizes.latent, by_head)
    key, value = _first(around[0], ("key_dim",)), _first(around[0], ("val_dim",))
    if role == FUSED and key and value:  # timm's: each head has its query, key and value rows together
        return _by_head(rows[role], (key, key, value))
    whole = not by_head and not _is_by_head(leaf, around[0])
    if whole and role != FUSED:
        return None, None
    if role == FUSED and sizes.value not in (None, sizes.head):
        return None, "heads of values have a size of their own: give split_rows in patterns"
    if sizes.counted_by_attention:
        sizes = sizes._replace(widths=(*sizes.widths, columns))
    head = sizes.head or _inferred(role, rows, sizes)
    if whole:
        return _whole_parts(rows, sizes._replace(head=head))
    if head is None:
        unknown = "no head size is known: give a config, or split_rows in patterns"
        return None, _UNFIT if sizes.heads else unknown
    return _by_head(rows[role], (head,))


def _is_by_head(leaf: str, attention: nn.Module) -> bool:
    """Whether the rows of each head are together in the weight, or may be."""
    by_class = type(attention).__name__.startswith(_BY_HEAD_CLASSES) and not attribute(attention, "multi_query")
    by_class = by_class or attribute(attention, "head_first") is True
    by_class = by_class or attribute(attention, "heads_per_kv") is not None
    return leaf in BY_HEAD or (by_class and ROLE_OF[leaf] == FUSED)


def rows_by_role(attention: nn.Module, axis: int) -> dict[str, int]:
    """Return the size along `axis` of the first weight of each role in an attention."""
    rows: dict[str, int] = {}
    for name, p in attention.named_parameters():
        role = ROLE_OF.get(leaf_of(name))
        if role is not None and p.ndim > 1:
            rows.setdefault(role, p.size(axis))
    return rows


def states_heads(module: nn.Module) -> bool:
    """Whether a module has a number of heads, or a head's size, as an attribute."""
    return _first(module, (*_HEADS, *_HEAD_DIM)) is not None


def leaf_of(name: str) -> str:
    """Return the name of a weight's module, or that of a parameter that is not called `weight`."""
    parts = bare_name(name).split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]


def _by_head(rows: int, head: tuple[int, ...]) -> Parts:
    """Return the parts of all heads; each head has the parts `head`, none of them too short to be a matrix."""
    size = sum(head)
    if min(head) < MIN_SIDE:
        few = f"heads of {min(head)} rows are less than the {MIN_SIDE} rows of a matrix"
        return None, f"{few}: to cut them give split_rows in patterns"
    if rows % size:
        return None, f"heads of {size} rows do not divide its row count: give split_rows in patterns"
    return head * (rows // size), None


def _latent_parts(role: str, rows: int, latent: tuple[int, ...], by_head: bool) -> Parts:
    """Return the parts of multi-head latent attention: up-projections by head, and the shared rotary key."""
    nope, rope, value = latent
    if role == "latent and rotary key":
        return (rows - rope, rope), None
    head = {"queries": (nope + rope,), "latent keys and values": (nope, value)}.get(role)
    return _by_head(rows, head) if by_head and head else (None, None)


def _whole_parts(rows: Rows, sizes: _Sizes) -> Parts:
    """Return the queries, keys and values of a fused weight, or its keys and values if queries have a weight beside it.

    Keys and values have equally many rows: as many as the queries, or a known number of heads.
    """
    if _without_queries(rows):
        return (rows[FUSED] // 2, rows[FUSED] // 2) if rows[FUSED] % 2 == 0 else None, None
    if sizes.heads is None:
        return None, "the number of heads is not known: give a config, or split_rows in patterns"
    if sizes.head is None:
        return None, _UNFIT
    queries, pair = sizes.head * sizes.heads, 2 * sizes.head
    rest = rows[FUSED] - queries
    # As many rows for keys and values together as for queries may be keys and values without queries.
    grouped = rest == pair * sizes.key_heads if sizes.key_heads else 0 < rest < 2 * queries and rest != queries
    if rest != 2 * queries and (not grouped or rest % pair):
        return None, _UNFIT
    return (queries, rest // 2, rest // 2), None


def _without_queries(rows: Rows) -> bool:
    """Whether the fused weight has only keys and values, as in GPT-2's cross attention."""
    return "queries" in rows and "keys" not in rows


def _inferred(role: str, rows: Rows, sizes: _Sizes) -> Optional[int]:
    """Return the rows of a head by the number of heads, or None if that is not certain.

    It is certain if all heads together are as wide as the model. If the attention itself has the number of heads, the
    rows of the queries are enough, and so is the number of heads of keys.
    """
    query = _quotient(rows.get("queries"), sizes.heads)
    key_heads = sizes.key_heads or sizes.heads or 0
    if role == FUSED:
        is_pair = _without_queries(rows)
        if is_pair and sizes.key_heads is None and rows[role] != 2 * rows["queries"]:
            return None  # keys and values may have heads of two sizes
        fused = (0 if is_pair else sizes.heads or 0) + 2 * key_heads
        size = agreed = _quotient(rows[role], fused)
        certain = sizes.key_heads is not None
    elif query is None:
        size = agreed = _quotient(rows[role], key_heads)
        certain = sizes.key_heads is not None
    else:
        key_heads = sizes.key_heads or _quotient(rows.get("keys"), query)
        size = _quotient(rows[role], key_heads) if role == "values" and key_heads else query
        agreed, certain = query, True
    usual = [_quotient(width, sizes.heads) for width in sizes.widths]
    return size if (certain and sizes.counted_by_attention) or agreed in usual else None


def _sizes(role: str, around: Sequence[nn.Module], config: Any) -> _Sizes:
    """Return the sizes in the innermost source that has a head size or a number of heads (latent: all of them).

    If that source has no number of heads, the number comes from the next source outwards that has one.
    """
    sources = [source for owner in around for source in (owner, attribute(owner, "config"))] + [config]
    keys = (*_VALUE_DIM, *_HEAD_DIM) if role in ("values", "gates of values") else (*_KEY_DIM, *_HEAD_DIM)
    for i, source in enumerate(sources):
        latent = tuple(size for size in (_first(source, (key,)) for key in _LATENT) if size is not None)
        if len(latent) == len(_LATENT):
            return _Sizes(_first(source, keys), latent=latent)
        head = _first(source, keys)
        if role.startswith("latent") or not (head or _first(source, _HEADS)):
            continue
        counting = next((each for each in sources[i:] if _first(each, _HEADS)), None)
        counts = (source, counting, attribute(counting, "config"))
        return _Sizes(
            head,
            _first(source, _VALUE_DIM),
            _first(counting, _HEADS),
            next(filter(None, (_first(each, _KEY_HEADS) for each in counts)), None),
            tuple(width for width in (_first(counting, (key,)) for key in _WIDTHS) if width is not None),
            counting is around[0],
        )
    return _Sizes()


def _first(source: Any, keys: Iterable[str]) -> Optional[int]:
    sizes = (attribute(source, key) for key in keys)
    whole = (int(size) for size in sizes if isinstance(size, Integral) and not isinstance(size, bool))  # also NumPy's
    return next((size for size in whole if size > 0), None)


def _quotient(rows: Optional[int], count: Optional[int]) -> Optional[int]:
    """Return rows / count if both are known and it is a whole number, else None."""
    return rows // count if rows and count and rows % count == 0 else None
