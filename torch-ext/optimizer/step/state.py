"""The state of parameters: checked, made, kept in line with groups, and copied from a loaded state dict."""

from __future__ import annotations

import copy
from typing import Any, Mapping, MutableMapping, Optional, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parameters.checks import check_backed, check_distinct, check_dtypes, check_norm, check_parameter
from ..parameters.matrices import view_in_group
from ..parameters.momentum_blocks import block_axes
from ..parameters.names import named_parameters
from ..parameters.rates import check_live_tensors
from ..parameters.settings import Group, keeps_norm
from ..parameters.state import (
    BUFFER,
    COUNT,
    FALLBACK_STATE,
    KEYS,
    SCALE,
    State,
    StateTensor,
    check_shapes,
    ensure_state_,
    placed,
    state_tensors,
)
from ..parameters.state_values import check_tensors
from ..plan.layout import layout_of, lies_beside, local_part, memory_beside
from ..plan.process_groups import Ranks
from ..plan.shards import check_blocks, is_whole, part_of_whole
from ..rules.momentum import dequantized, quantized


def checked_parameters(
    groups: Sequence[Group], state: State, replica_ranks: Optional[Ranks]
) -> list[tuple[Group, str, Tensor]]:
    """Return the parameters that have or get a state, each with its group and its name there.

    Those on meta and frozen ones without a gradient get none. Changes nothing. Raises TypeError or ValueError if a
    parameter or its `state` does not fit the settings of its group, or if a setting is a tensor on another device.
    """
    checked = []
    for group in groups:
        check_live_tensors(group)
        for name, p in named_parameters(group):
            _check_parameter(name, p, group, replica_ranks)
            if has_state(p, state):
                _check_state(state.get(p, {}), name, p, group, replica_ranks)
                checked.append((group, name, p))
    return checked


def check_memory(groups: Sequence[Group], state: State) -> None:
    """Raise ValueError if a step would change an element of parameters or states more than once, or freed memory."""
    named = _with_state(groups, state)
    kept = ((name, key, value) for name, p in named for key, value in state.get(p, {}).items())
    states = [
        (f"state {key} of {name}", local_part(x)) for name, key, x in kept if key in KEYS and isinstance(x, Tensor)
    ]
    for name, x in [(name, local_part(p)) for name, p in named if p.grad is not None] + states:
        check_backed(name, x)
    check_distinct([(name, local_part(p)) for name, p in named], states)


def _with_state(groups: Sequence[Group], state: State) -> list[tuple[str, Tensor]]:
    """Return name and tensor of each parameter that has or gets a state."""
    return [(name, p) for group in groups for name, p in named_parameters(group) if has_state(p, state)]


def bring_states_(
    groups: Sequence[Group],
    state: dict[Tensor, Any],
    away: MutableMapping[Tensor, Any],
    replica_ranks: Optional[Ranks],
    moving: bool = True,
) -> None:
    """Complete `state` in place: make missing tensors, convert others and, if `moving`, bring them to their devices.

    The state of parameters that are in no group goes to `away`. Raises TypeError or ValueError where a parameter or its
    state does not fit, and RuntimeError under `torch.inference_mode`; then nothing has changed.
    """
    for name, p in _with_state(groups, state):
        check_tensors(state.get(p, {}), name, p)
    checked = checked_parameters(groups, state, replica_ranks)
    check_memory(groups, state)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "state made under torch.inference_mode could not be changed by any step: construct the optimizer, and load "
            "or clear its state, outside of it; torch.no_grad() does no harm"
        )
    for group, name, p in checked:
        _bring_state_(state[p], name, p, group, moving)
    current = {p for group in groups for p in group["params"]}
    for p in [p for p in state if isinstance(p, Tensor) and p not in current]:
        entry = state.pop(p)
        if entry:  # reading a defaultdict makes empty ones
            away[p] = entry


def has_state(p: Tensor, state: State) -> bool:
    """Return whether a parameter has or gets a state: those on meta and frozen ones without a gradient get none."""
    return not p.is_meta and (p.requires_grad or p.grad is not None or p in state)


def copy_loaded_(groups: Sequence[Group], state: Mapping[Tensor, dict[str, Any]], loaded: Mapping[str, Any]) -> None:
    """Give `state`, which torch has loaded, copies of the tensors of the state dict `loaded`, in the saved dtype.

    Torch shares them, and casts momentum. What other packages keep there is copied, too, as torch has cast it.
    """
    params = [(*pair, group) for group in groups for pair in named_parameters(group)]
    positions = [i for group in loaded["param_groups"] for i in group["params"]]
    for position, (name, p, group) in zip(positions, params):
        kinds = state_tensors(name, p, group)
        for key, value in loaded["state"].get(position, {}).items():
            if key in kinds:  # a count is a number in files of torch before 1.12
                # Not `as_tensor`, which moves tensors to torch's default device, too.
                value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device=p.device)
                is_cut = kinds[key].shape is not None and is_whole(value, p)
                value = part_of_whole(value, p) if is_cut else value
                state[p][key] = placed(p, value, kinds[key], memory_beside, copy=not is_cut)
            else:
                state[p][key] = copy.deepcopy(state[p][key])


def _bring_state_(state: dict[str, Tensor], name: str, p: Tensor, group: Group, moving: bool) -> None:
    """Make what `state` of `p` lacks for its group, in place, and bring the rest into its form and, if told, place."""
    wanted = state_tensors(name, p, group)
    wholes = {key: state[key] for key in KEYS if key in state and key != COUNT and is_whole(state[key], p)}
    if not moving and any(whole.device != p.device for whole in wholes.values()):
        return  # they are cut where they are brought back
    state.update({key: part_of_whole(whole, p) for key, whole in wholes.items()})
    if BUFFER in state and BUFFER in wanted and (state[BUFFER].dtype == torch.int8) != (SCALE in wanted):
        _convert_momentum_(state, p, block_axes(view_in_group(name, p, group)), wanted)
    ensure_state_(state, p, wanted, memory_beside, moving)


def _check_parameter(name: str, p: Tensor, group: Group, replica_ranks: Optional[Ranks]) -> None:
    """Raise TypeError or ValueError if a parameter does not fit the settings of its group."""
    check_parameter(name, p, group["use_muon"], group["master_weights"])
    if group["use_muon"]:
        asked = {key: group[key] for key in ("ns_dtype", "momentum_dtype")}
        check_dtypes(name, p, {key: value and getattr(torch, value) for key, value in asked.items()})
    if group["use_muon"] and group["offload"] and layout_of(name, p, replica_ranks) is not None:
        raise ValueError(
            "offload is not supported for DTensors, nor for copies under ExchangeOptions(process_group=...), and "
            f"{name} is one of them"
        )


def _check_state(
    state: Mapping[str, Tensor], name: str, p: Tensor, group: Group, replica_ranks: Optional[Ranks]
) -> None:
    """Raise ValueError if the state of a parameter does not fit it, or if its norm must be kept and cannot be.

    It does not fit with other shapes or placements, with a part of AdamW's tensors, with 8-bit codes without scales, or
    if shards cut their blocks.
    """
    wanted = state_tensors(name, p, group)
    layout = layout_of(name, p, replica_ranks) if keeps_norm(group) or SCALE in wanted else None
    if keeps_norm(group):
        check_norm(name, p, layout is not None)
    if SCALE in wanted and layout is not None:
        check_blocks(name, view_in_group(name, p, group), layout)
    if BUFFER in state and state[BUFFER].dtype == torch.int8 and SCALE not in state:
        raise ValueError(f"state {BUFFER} of {name} is in 8 bits, and its {SCALE} is missing")
    of_fallback = [key for key in FALLBACK_STATE if key in wanted and not wanted[key].is_elsewhere]
    lacking = [key for key in of_fallback if key not in state]
    if lacking and lacking != of_fallback:
        raise ValueError(
            f"state {', '.join(lacking)} of {name} is missing, and the rest is there: write del optimizer.state[p] for "
            "this parameter p, so that it starts anew"
        )
    check_dtypes(name, p, {BUFFER: state[BUFFER].dtype} if BUFFER in state else {})
    check_shapes(state, name, p, wanted)
    for key, kind in wanted.items():
        if kind.shape is not None and key in state:
            _check_place(f"state {key} of {name}", state[key], p)


def _check_place(name: str, value: Tensor, p: Tensor) -> None:
    """Raise ValueError unless a state tensor of `p`, called `name`, is whole, or lies on ranks as `p` does."""
    if isinstance(value, DTensor) and not isinstance(p, DTensor):
        raise ValueError(
            f"{name} is sharded and the parameter is whole: between the two, states are saved and loaded by "
            "torch.distributed.checkpoint, or by get_optimizer_state_dict with StateDictOptions(full_state_dict=True) "
            "and load_state_dict"
        )
    if not lies_beside(name, value, p):
        raise ValueError(
            f"{name} has placements {value.placements} on {value.device_mesh}, and the parameter {p.placements} on "
            f"{p.device_mesh}: after a parameter was resharded, redistribute its state, too"
        )


def _convert_momentum_(
    state: dict[str, Tensor], p: Tensor, axes: Sequence[int], wanted: Mapping[str, StateTensor]
) -> None:
    """Bring momentum in `state` of `p` from floating point into 8 bits, with blocks along `axes`, or back."""
    buffer = state[BUFFER]
    made = {BUFFER: torch.empty_like(buffer, dtype=wanted[BUFFER].dtype)}
    if SCALE in wanted:
        made[SCALE] = memory_beside(p, wanted[SCALE].shape, torch.float32)
    if local_part(buffer).numel():  # a rank that is not in the mesh has none, and perhaps one dimension
        if SCALE in wanted:
            values = quantized(_lines(buffer, axes))
        else:
            lines = (_lines(each, axes).to(buffer.device) for each in (buffer, state[SCALE]))
            values = (dequantized(*lines, made[BUFFER].dtype),)
        for tensor, of_lines in zip(made.values(), values):
            _fill_(tensor, of_lines, axes)
    state.update(made)  # only now, because memory may have run out before


def _lines(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return this process's part of a tensor as a matrix whose rows are its elements along `axes`."""
    permuted = _permuted(tensor, axes)
    return permuted.flatten(permuted.ndim - len(axes)).flatten(0, -2)


def _fill_(tensor: Tensor, lines: Tensor, axes: Sequence[int]) -> None:
    """Write `lines` to where `_lines` reads them, on whichever device."""
    permuted = _permuted(tensor, axes)
    permuted.copy_(lines.view(permuted.shape))


def _permuted(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    others = [axis for axis in range(tensor.ndim) if axis not in axes]
    return local_part(tensor).permute(*others, *axes)
