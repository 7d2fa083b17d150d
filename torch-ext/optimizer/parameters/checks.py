"""Checks whether parameters can be optimized, as matrices or at all, and whether steps can write to them."""

from __future__ import annotations

from typing import Iterable, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..iteration import DTYPES
from ..kernels.formats import PLAIN_CLASSES, exact_dtype
from ..kernels.portable.memory import extent
from ..kernels.tracing import lacks_values, would_be_faked

# Attributes that wrappers set on the flat vector that they make of many parameters, or on the parameters.
_FLATTENED = {
    **dict.fromkeys(("_is_flat_param", "_fsdp_flattened"), "FSDP1 (FullyShardedDataParallel)"),
    **dict.fromkeys(("ds_id", "ds_shape"), "DeepSpeed's ZeRO"),
}


def check_parameter(name: str, p: Tensor, use_muon: bool, master_weights: Optional[str] = None) -> None:
    """Raise unless `p` can be optimized: dense, of one of `DTYPES`, not part of a flat vector, and a matrix for Muon.

    Muon needs its values in one tensor. With `master_weights` it must not be float16, which 16 more bits cannot extend
    to float32.
    """
    if p.dtype not in DTYPES:
        instead = (
            "give it to a torch.optim.AdamW beside this optimizer"
            if p.is_complex()
            else "leave it out. [(name, p) for name, p in model.named_parameters() if p.requires_grad] leaves out "
            "quantized and frozen parameters"
        )
        raise TypeError(f"parameters must be {', '.join(map(str, DTYPES))}, {name} is {p.dtype}: {instead}")
    if master_weights is not None and p.dtype == torch.float16:
        raise ValueError(
            f"master_weights={master_weights!r} extends bfloat16 to float32 by 16 bits, and {name} is float16, whose "
            "exponent has another width: train it in bfloat16, or in a group with master_weights=None"
        )
    wrapper = next((wrapper for attribute, wrapper in _FLATTENED.items() if hasattr(p, attribute)), None)
    if wrapper is not None:
        raise ValueError(
            f"{name} belongs to {wrapper}, which cuts up a flat vector of many parameters: the piece here, of shape "
            f"{tuple(p.shape)}, is not a matrix, and AdamW instead would be another optimizer. Muon needs whole "
            "parameters, as in DistributedDataParallel, or their shards, as in FSDP2: use fully_shard instead of "
            "FullyShardedDataParallel, and DeepSpeed's stage 0"
        )
    if p.layout != torch.strided:
        raise ValueError(f"parameters must be dense tensors, {name} has layout {p.layout}")
    if p.is_neg():
        raise ValueError(f"{name} is a view that negates what is in memory: give its .resolve_neg().detach()")
    if use_muon:
        _check_one_tensor(name, p)
        check_matrix(name, p)


def _check_one_tensor(name: str, p: Tensor) -> None:
    """Raise TypeError for a trainable wrapper subclass with several inner tensors; a DTensor has one, and its mesh."""
    parts = p.__tensor_flatten__()[0] if p.requires_grad and hasattr(p, "__tensor_flatten__") else ()
    inner = [part for part in parts if isinstance(getattr(p, part), Tensor)]
    if len(inner) > 1:
        raise TypeError(
            f"{name} is a {type(p).__name__}, which keeps its values in {len(inner)} tensors, {' and '.join(inner)}: "
            "Muon needs them in one. Give it a plain tensor, or write use_muon=False in its group for AdamW"
        )


def check_trainable(name: str, p: Tensor) -> None:
    """Raise ValueError for a tensor that looks like a parameter but never gets a gradient."""
    if p.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode, where nothing can be trained: make it outside")
    if not p.is_leaf and not p.retains_grad:
        raise ValueError(
            f"{name} is a non-leaf tensor, computed from others, which gets no gradient: give the nn.Parameter that it "
            "was computed from, or its .detach().requires_grad_()"
        )


def check_fake_mode(params: Iterable[Tensor]) -> None:
    """Raise RuntimeError under a FakeTensorMode, unless all parameters are fake.

    A plan, states and views of real ones would be fake, and real steps that use them later would change nothing.
    """
    if would_be_faked(params):
        raise RuntimeError(
            "under FakeTensorMode this optimizer needs fake parameters: make model and optimizer there, or leave the "
            "mode before you call this"
        )


def check_matrix(name: str, p: Tensor) -> None:
    """Raise ValueError unless `p`, asked for by the user, can be seen as matrices."""
    if p.ndim < 2 or 0 in p.shape:
        raise ValueError(
            f"Muon was asked for {name}, which is not a matrix: its shape is {tuple(p.shape)}. For AdamW leave "
            "use_muon out of its group, let is_muon return False, or write a narrower pattern (wrappers that flatten "
            "parameters, such as FSDP1 and DeepSpeed's ZeRO, leave no matrices: use FSDP2 or stage 0)"
        )


def check_dtypes(name: str, p: Tensor, wanted: Mapping[str, Optional[torch.dtype]]) -> None:
    """Raise ValueError if a `wanted` dtype, whose key says what has it, is float64 and the device of `p` has none."""
    for what, dtype in wanted.items():
        if dtype is not None and exact_dtype(p.device, dtype) != dtype:
            raise ValueError(f"{what} of {name} is {dtype}, which {p.device} does not have: make it float32")


def check_norm(name: str, p: Tensor, is_shared: bool) -> None:
    """Raise ValueError if steps cannot keep the norms of the matrices of `p`.

    That is the case in 16 bits, where rounding changes norms, and for zeros. Parameters that ranks share, and those
    without values, are not searched for zeros.
    """
    if p.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"experimental_hyperball needs float32 or float64 matrices, {name} is {p.dtype}")
    if not is_shared and not lacks_values(p) and not p.any():
        raise ValueError(f"experimental_hyperball keeps norms of matrices, but {name} is zero: give it values first")


class _Span(NamedTuple):
    """The bytes of a storage from a tensor's first element to its last."""

    first: int
    end: int
    gapless: bool
    name: str
    is_state: bool


def check_distinct(named: Sequence[tuple[str, Tensor]], states: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError if a step would certainly change an element of these plain tensors more than once.

    That is certain if a parameter comes twice, if two tensors begin at one element, or if one begins inside another
    without gaps. It also raises for a tensor that may have several elements at one place, since the kernels refuse to
    write such a one. `named` are parameters, and `states` tensors of their states.
    """
    spans_by_storage: dict[int, list[_Span]] = {}
    names: dict[Tensor, str] = {}
    for name, p in named:
        if p in names:
            raise ValueError(f"{name} is a parameter that the optimizer already has, as {names[p]}: remove one of them")
        names[p] = name
        _add_span_(spans_by_storage, name, p, is_state=False)
    for name, tensor in states:
        _add_span_(spans_by_storage, name, tensor, is_state=True)
    for spans in spans_by_storage.values():
        spans.sort()
        for one, other in zip(spans, spans[1:]):
            if one.first == other.first or (one.gapless and other.first < one.end):
                raise ValueError(_shared(one, other))


def check_backed(name: str, x: Tensor) -> None:
    """Raise ValueError if a plain tensor with elements has lost its memory, or the end of it, as by `resize_`."""
    if not _lies_in_memory(x):
        return
    needed = x.element_size() * (x.storage_offset() + extent(x).elements)
    if x.untyped_storage().size() < needed:
        left = f"{x.untyped_storage().size()} of {needed} bytes are left"
        raise ValueError(f"the memory of {name} was freed: {left}. Give it back, with its values, before the step")


def _lies_in_memory(x: Tensor) -> bool:
    """Whether x is a plain tensor with elements. Where those of other kinds lie is not known."""
    return type(x) in PLAIN_CLASSES and not x.is_meta and x.numel() > 0


def _add_span_(spans: dict[int, list[_Span]], name: str, x: Tensor, is_state: bool) -> None:
    """Add the span of a plain tensor with elements, by its storage; ValueError if it cannot be written."""
    if not _lies_in_memory(x):
        return
    reach = extent(x)
    if not reach.distinct:
        cure = "Put" if is_state else "Give the parameter that it was expanded from, or"
        raise ValueError(
            f"{name} {tuple(x.shape)} has several elements at one place, with strides {x.stride()}. {cure} its "
            f".contiguous(){' there' if is_state else ''}"
        )
    first, end = (x.element_size() * place for place in (x.storage_offset(), x.storage_offset() + reach.elements))
    spans.setdefault(x.untyped_storage()._cdata, []).append(_Span(first, end, reach.gapless, name, is_state))


def _shared(one: _Span, other: _Span) -> str:
    if not one.is_state and not other.is_state:
        return (
            f"{one.name} and {other.name} share memory, and are different parameters: each would be updated as "
            "if the other were not there. Tie weights by one parameter, such as head.weight = embedding.weight"
        )
    state, other = (one, other) if one.is_state else (other, one)
    return f"{state.name} shares memory with {other.name}, and a step changes both: put its .clone() into the state"
