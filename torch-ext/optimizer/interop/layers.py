"""The parts of a model's weight (heads, fused projections, gate and up), found by names and by sizes.

Names are those of transformers, torch, timm and nanoGPT. Sizes are attributes of the modules around a weight, from the
innermost outwards, or of a config: head sizes of attentions, orientation of experts. No library is imported for this.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Optional, Sequence, Tuple

from torch import Tensor, nn

from ..parameters.matrices import is_stack
from ..parameters.routing import bare_name

# In this weight each head has its query, key and value rows together, so it can only be cut by head.
_BY_HEAD = "query_key_value"
_ROLES = {
    "queries": {"q", "q_proj", "query", "query_proj", "wq", "to_q", "q_lin", "q_attn", "q_b_proj", "q_proj_weight"},
    "keys": {"k", "k_proj", "key", "key_proj", "wk", "to_k", "k_lin", "k_proj_weight"},
    "values": {"v", "v_proj", "value", "value_proj", "wv", "to_v", "v_lin", "v_proj_weight"},
    "queries, keys and values": {"qkv", "qkv_proj", "c_attn", "wqkv", "Wqkv", "to_qkv", "in_proj_weight", _BY_HEAD},
    "latent keys and values": {"kv_b_proj"},
    "latent and rotary key": {"kv_a_proj_with_mqa"},
    "gate and up": {"gate_up_proj", "gate_up", "gate_and_up_proj", "w12", "w13", "Wi"},
}
_ROLE_OF = {leaf: role for role, leaves in _ROLES.items() for leaf in leaves}
_DOWN = ("down_proj", "down", "w2")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_kv", "dim_head")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
_WIDTH = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Cutting(NamedTuple):
    """How to cut weights: attention by head or only into queries, keys and values; gate and up apart or not.

    `config`, which may be None, has sizes that no module has.
    """

    config: Any
    heads: bool
    gate_up: bool


class Cut(NamedTuple):
    """The role of a weight, the group settings that cut it accordingly, and a remark on missing information."""

    role: str
    settings: dict[str, Any]
    remark: Optional[str] = None


class _Sizes(NamedTuple):
    """Rows of a head, number of heads, and for latent attention the position-free, rotary and value rows."""

    head: Optional[int]
    heads: Optional[int]
    latent: Optional[tuple[int, ...]]


def stack_in(name: str, p: Tensor, owner: nn.Module) -> Optional[bool]:
    """Return whether the parameter of `owner` is a stack of matrices, not a convolution; None if nothing shows it."""
    if isinstance(owner, nn.modules.conv._ConvNd):
        return False
    named = is_stack(name, p.ndim, ("experts",))
    if named is not None or p.ndim != 3:
        return named
    counts = [getattr(owner, key, None) for key in ("num_experts", "n_experts", "num_local_experts")]
    return True if "expert" in type(owner).__name__.lower() or p.size(0) in counts else None


def cut_of(name: str, p: Tensor, owners: Sequence[nn.Module], cutting: Cutting) -> Cut:
    """Return the parts of a matrix or of a stack; `owners` are the modules around it, the innermost first."""
    stack = stack_in(name, p, owners[0])
    settings: dict[str, Any] = {} if p.ndim < 3 or stack is None else {"stacked": stack}
    if p.ndim > 2 and not stack:
        return Cut("convolution", settings)
    turned = _is_turned(owners[0]) if stack else type(owners[0]).__name__ == "Conv1D"
    if turned:
        settings["transposed"] = True
    role, parts, remark = _parts(name, p.size(-1 if turned else -2), owners, cutting)
    remark = None if remark is None else f"are not cut, because {remark}"
    if turned is None:
        less, also = ("", "") if parts is None else ("not cut, and ", " and split_rows")
        parts = None
        lies = f"are {less}assumed to be (E, out, in), because no sizes show it: give transposed{also} in patterns"
        remark = lies if remark is None else f"{remark}, and {lies}"
    if parts is not None and len(parts) > 1:
        settings["split_rows"] = parts
    if stack:
        role = "experts" if role == "matrix" else f"experts: {role}"
    return Cut(role, settings, remark)


def _is_turned(experts: nn.Module) -> Optional[bool]:
    """Return whether a module's stacks are (E, in, out), by its attribute or by the sizes of its projections, or None.

    The fused gate and up projection has twice as many outputs as the down projection has inputs.
    """
    said = getattr(experts, "is_transposed", None)
    if isinstance(said, bool):
        return said
    stacks = {name: p.shape for name, p in experts.named_parameters(recurse=False) if p.ndim == 3}
    up = next((shape for name, shape in stacks.items() if _ROLE_OF.get(name) == "gate and up"), None)
    down = next((shape for name, shape in stacks.items() if name in _DOWN), None)
    if up is None or down is None:
        return None
    (_, rows, cols), (_, down_rows, down_cols) = up, down
    plain, turned = (rows, cols) == (2 * down_cols, down_rows), (cols, rows) == (2 * down_rows, down_cols)
    return turned if plain != turned else None


# The role of a weight, the row counts of its parts (None for one part), and the reason if it is not cut but could be.
_Parts = Tuple[str, Optional[Tuple[int, ...]], Optional[str]]


def _parts(name: str, rows: int, owners: Sequence[nn.Module], cutting: Cutting) -> _Parts:
    leaf = _leaf(name)
    role = _ROLE_OF.get(leaf, "matrix")
    if role == "gate and up":
        return _gate_and_up(role, rows, owners[0], cutting.gate_up)
    if role == "matrix" or not _in_attention(name, owners):
        return "matrix", None, None
    sizes = _sizes(owners, cutting.config)
    if sizes.latent is not None and role != "queries, keys and values":
        return _latent_parts(role, rows, sizes.latent, cutting.heads)
    if not cutting.heads and leaf != _BY_HEAD:
        return _whole_parts(role, rows, sizes)
    if sizes.head is None:
        return role, None, "no head size is known: give a config, or split_rows in patterns"
    return _by_head(role, rows, (sizes.head,))


def _by_head(role: str, rows: int, head: tuple[int, ...]) -> _Parts:
    """Return the parts of all heads; each head has the parts `head`."""
    size = sum(head)
    if rows % size:
        return role, None, f"heads of {size} rows do not divide its row count: give split_rows in patterns"
    return role, head * (rows // size), None


def _gate_and_up(role: str, rows: int, owner: nn.Module, gate_up: bool) -> _Parts:
    if getattr(owner, "has_gate", True) is False:
        return "matrix", None, None
    # In gpt-oss the rows of gate and up alternate; its class has an attribute for this only from transformers 5 on.
    if getattr(owner, "is_concatenated", not type(owner).__name__.startswith("GptOss")) is False:
        return role, None, "their rows alternate"
    return role, (rows // 2, rows // 2) if gate_up and rows % 2 == 0 else None, None


def _latent_parts(role: str, rows: int, latent: tuple[int, ...], heads: bool) -> _Parts:
    """Return the parts of multi-head latent attention: up-projections by head, and the shared rotary key."""
    nope, rope, value = latent
    if role == "latent and rotary key":
        return role, (rows - rope, rope), None
    head = {"queries": (nope + rope,), "latent keys and values": (nope, value)}.get(role)
    return _by_head(role, rows, head) if heads and head else (role, None, None)


def _whole_parts(role: str, rows: int, sizes: _Sizes) -> _Parts:
    """Return the parts of a fused weight: queries, keys and values; keys and values have equally many rows."""
    if role != "queries, keys and values":
        return role, None, None
    queries = sizes.head * sizes.heads if sizes.head and sizes.heads else 0
    if not 0 < queries < rows or (rows - queries) % 2:
        return role, None, "the number of heads is not known: give a config, or split_rows in patterns"
    return role, (queries, (rows - queries) // 2, (rows - queries) // 2), None


def _sizes(owners: Sequence[nn.Module], config: Any) -> _Sizes:
    """Return the sizes and the number of heads, each from the innermost source that has it."""
    sources = (*owners, *(getattr(owner, "config", None) for owner in owners), config)
    number = next(filter(None, (_first(source, _HEADS) for source in sources)), None)
    for source in sources:
        width, heads = _first(source, _WIDTH), _first(source, _HEADS)
        latent = tuple(size for size in (_first(source, (key,)) for key in _LATENT) if size is not None)
        head = _first(source, _HEAD_DIM)
        if head is None and width and heads and width % heads == 0:
            head = width // heads
        if head is not None or len(latent) == len(_LATENT):
            return _Sizes(head, number, latent if len(latent) == len(_LATENT) else None)
    return _Sizes(None, None, None)


def _first(source: Any, keys: Iterable[str]) -> Optional[int]:
    sizes = (getattr(source, key, None) for key in keys)
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)


def _in_attention(name: str, owners: Sequence[nn.Module]) -> bool:
    """Whether a module around the weight is an attention, by name or class; `key` and `v` occur elsewhere too."""
    said = f"{name} {' '.join(type(owner).__name__ for owner in owners[:2])}".lower()
    return "attn" in said or "attention" in said


def _leaf(name: str) -> str:
    """Return the name of a weight's module, or that of a parameter that is not called `weight`."""
    parts = bare_name(name).split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]
