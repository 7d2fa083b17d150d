"""Optimizer state of a parameter: which tensors it has, how they are made, and which saved tensors fit."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from .matrices import moments_in_group, part_here
from .momentum_blocks import blocks_in_group, scales_shape
from .offload import host_zeros_like

# The keys of momentum, of its scales if it is 8-bit, and of second moments.
BUFFER, SCALE, MOMENTS = "momentum_buffer", "momentum_scale", "second_moment"

# The key of the number of steps that AdamW has taken.
COUNT = "step"

# The version of the file format, in every saved group. It is raised by changes that older files do not fit or that
# older versions would misread: in 2, AdamW's rate is `lr * lr_factor`; in 1 it was `lr`.
STATE_FORMAT = 2

# The key of the lower half of the float32 value of a bfloat16 parameter (`kernels/master_weights.py`). These are 16-bit
# integers stored in a bfloat16 tensor, because checkpoints are gathered and neither NCCL nor gloo sends int16.
REMAINDER = "remainder"

# `(p, shape, dtype)` -> memory for a tensor of this shape on the same devices, sharded over ranks like `p`.
Memory = Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]

# AdamW's whole state, in the order of `FallbackTensors`: none of it means anything without the rest.
FALLBACK_STATE = ("exp_avg", "exp_avg_sq", COUNT)

# Every key of this package. State that wrappers such as timm's Lookahead keep under other keys is not touched.
KEYS = (BUFFER, SCALE, MOMENTS, REMAINDER, *FALLBACK_STATE)


# The state of an optimizer: for each parameter that has one, its tensors by these keys.
State = Mapping[Tensor, Mapping[str, Tensor]]


class StateTensor(NamedTuple):
    """One tensor of a parameter's state; new ones are zeros."""

    shape: Optional[tuple[int, ...]]  # of the whole tensor, None for a count
    dtype: torch.dtype
    keeps_dtype: bool = False  # keeps the dtype in which it was made or saved, even when the parameter is cast
    on_host: bool = False
    may_lack: bool = False  # may be missing in a file, and is zeros then
    is_elsewhere: bool = False  # only ranks that have a part of the parameter keep it, and this one has none


def state_tensors(name: str, p: Tensor, group: Mapping[str, Any]) -> dict[str, StateTensor]:
    """Return the state tensors of a parameter of this group, by the keys of torch.optim.Muon and torch.optim.AdamW.

    Momentum has the group's `momentum_dtype`; with `int8` it has scales. If that is None, new momentum has the dtype of
    the parameter, and other momentum keeps the dtype in which it was made or saved. AdamW's averages have the
    parameter's dtype, or float32 with a `remainder` and for float16, whose range holds few squares. Second moments,
    which only some settings ask for, are on the parameter's device, in float32 or wider. Ranks without a part do not
    count steps: of a count that several ranks have, a checkpoint stores that of any one.
    """
    shape, on_host = tuple(p.shape), group["offload"]
    is_split = has_remainder(p, group)
    remainder = {REMAINDER: StateTensor(shape, p.dtype, may_lack=True)} if is_split else {}
    if not group["use_muon"]:
        average = StateTensor(shape, torch.float32 if is_split or p.dtype == torch.float16 else p.dtype)
        count = StateTensor(None, torch.float32, is_elsewhere=is_elsewhere(p))
        return {COUNT: count, "exp_avg": average, "exp_avg_sq": average, **remainder}
    dtype = p.dtype if group["momentum_dtype"] is None else getattr(torch, group["momentum_dtype"])
    keeps_dtype = group["momentum_dtype"] in (None, "int8")  # only a higher floor makes codes of values
    tensors = {BUFFER: StateTensor(shape, dtype, keeps_dtype=keeps_dtype, on_host=on_host), **remainder}
    blocks = blocks_in_group(name, p, group)
    if blocks is not None:
        tensors[SCALE] = StateTensor(scales_shape(blocks, shape), torch.float32, on_host=on_host, may_lack=True)
    moments = moments_in_group(name, p, group)
    if moments is not None:
        tensors[MOMENTS] = StateTensor(moments.shape_in(shape), moments_dtype(p.dtype))
    return tensors


def integers(remainder: Tensor) -> Tensor:
    """Return a remainder, which must not be a DTensor, as an int16 view of its memory."""
    return remainder.view(torch.int16)


def has_remainder(p: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the state of `p` holds the lower half of its float32 value."""
    return group["master_weights"] == "split" and p.dtype == torch.bfloat16


def is_elsewhere(p: Tensor) -> bool:
    """Whether `p` lies on a mesh of ranks to which this one does not belong."""
    mesh = getattr(p, "device_mesh", None)  # of a DTensor, which only higher floors know
    return mesh is not None and mesh.get_coordinate() is None


def moments_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of second moments for parameters of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def ensure_state_(
    state: dict[str, Tensor], p: Tensor, wanted: Mapping[str, StateTensor], memory: Memory, moving: bool
) -> None:
    """Complete the `state` of `p` in place: make the `wanted` tensors that it lacks, and move the others if needed.

    They belong on the device of `p`, or in host memory for momentum of groups with `offload`; unless `moving`, those on
    other devices stay as they are. `memory` makes tensors of other shapes than that of `p`. Tensors that the group no
    longer asks for are removed. Call `check_shapes` before.
    """
    kept = {key: kind for key, kind in wanted.items() if not kind.is_elsewhere}
    for key in set(KEYS) - kept.keys():
        state.pop(key, None)
    for key, kind in kept.items():
        if key in state:
            if moving or state[key].device == p.device:
                state[key] = placed(p, state[key], kind, memory)
        elif kind.shape is None:
            state[key] = torch.zeros((), dtype=kind.dtype, device=p.device)
        else:
            make = host_zeros_like if kind.on_host else torch.zeros_like
            state[key] = make(_like(p, kind, memory), dtype=kind.dtype).requires_grad_(False)


def _like(p: Tensor, kind: StateTensor, memory: Memory) -> Tensor:
    """Return a tensor of the kind's shape, sharded like `p`: `p` itself if it has that shape."""
    return p if kind.shape == tuple(p.shape) else memory(p, kind.shape, kind.dtype)


def placed(p: Tensor, value: Tensor, kind: StateTensor, memory: Memory, copy: bool = False) -> Tensor:
    """Return `value` on the right device, in its kind's dtype and, unless it is a count, with the layout of `p`.

    If `value` has all this already, it is returned itself, unless `copy`. Host memory is pinned if `p` is on a GPU.
    """
    dtype = value.dtype if kind.keeps_dtype else kind.dtype
    if kind.shape is None:
        return value.to(p.device, dtype, copy=copy)
    p = _like(p, kind, memory)
    alike = value.stride() == p.stride() and part_here(value).stride() == part_here(p).stride()
    if kind.on_host:
        on_host = value.device.type == "cpu" and value.is_pinned() == p.is_cuda
        unchanged = alike and on_host and value.dtype == dtype
        return value if unchanged and not copy else host_zeros_like(p, dtype).copy_(value)
    if alike and value.device == p.device:
        return value.to(dtype=dtype, copy=copy)
    return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(value)


def check_shapes(
    state: Mapping[str, Any],
    name: str,
    p: Tensor,
    wanted: Mapping[str, StateTensor],
    cure: Optional[str] = None,
) -> None:
    """Raise ValueError, which contains the `cure`, if a tensor of the state of `p` has another shape than `wanted`.

    Counts may have any shape. By default the `cure` is to delete second moments alone, and otherwise the whole state.
    """
    for key, kind in wanted.items():
        value = state.get(key)
        if isinstance(value, Tensor) and kind.shape is not None and tuple(value.shape) != kind.shape:
            of_key = f"[{key!r}]" if key == MOMENTS else ""
            by_default = f"del optimizer.state[p]{of_key} for this parameter p, so that it starts anew"
            raise ValueError(
                f"state {key} of {name} has shape {tuple(value.shape)}, needs {kind.shape} for its parameter "
                f"{tuple(p.shape)}. If that was resized or given another memory format, or if its group now sees other "
                f"matrices in it, {cure or by_default}"
            )


def check_loaded(state: Mapping[str, Any], name: str, p: Tensor, group: Mapping[str, Any], position: int) -> None:
    """Raise ValueError unless a loaded state of `p`, saved at `position`, fits its group or is empty.

    Momentum without scales is floating-point momentum, which groups with 8-bit momentum accept too. Keys of other
    packages may hold anything. `state_values` has checked the kinds of the tensors.
    """
    wanted = state_tensors(name, p, group)
    needed = {key for key, kind in wanted.items() if not kind.may_lack and not kind.is_elsewhere}
    if REMAINDER in state and REMAINDER not in wanted:
        raise ValueError(
            f"the state of {name} was saved with the lower half of a float32 value, which a {p.dtype} parameter with "
            f"master_weights={group['master_weights']!r} cannot hold. Load it with bfloat16 parameters and "
            "master_weights='split', and get float32 values from master_weights()"
        )
    if state and not needed <= set(KEYS) & set(state) <= set(wanted):
        raise ValueError(
            f"{name} {tuple(p.shape)} is updated by {'Muon' if group['use_muon'] else 'AdamW'} and needs the state "
            f"{', '.join(wanted)}, got {', '.join(map(str, state))}: {_anew(name, position)}"
        )
    check_shapes(state, name, p, wanted, _anew(name, position))


def _anew(name: str, position: int) -> str:
    """Return how to load a file without the state of a parameter, which has its position or its name there."""
    return (
        f'call state_dict["state"].pop({position}) before loading: the state of this parameter starts new, the rest is '
        f'loaded. If names are its keys, call .pop("{name}"), and load with StateDictOptions(strict=False). If it is '
        f"flattened, take the values of the keys that start with state.{name}. from what get_optimizer_state_dict "
        "returns for this optimizer"
    )
