"""The state of a parameter, made and kept in line with its group: also momentum, in 8 bits or in floating point."""

from __future__ import annotations

from typing import Mapping, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.checks import check_norm, check_parameter
from ..parameters.groups import names_of
from ..parameters.matrices import view_in_group
from ..parameters.momentum_blocks import block_axes
from ..parameters.rates import check_live_tensors
from ..parameters.settings import Group
from ..parameters.state import BUFFER, SCALE, StateTensor, check_shapes, ensure_state, state_tensors
from ..plan.layout import layout_of, local_part, memory_beside
from ..plan.process_groups import Ranks
from ..plan.shards import check_blocks
from ..rules.momentum import dequantized, quantized


def checked_parameters(
    groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Tensor]], replica_ranks: Optional[Ranks]
) -> list[tuple[Group, str, Tensor]]:
    """Return the parameters that have or get a state, each with its group and its name there.

    Those on meta and frozen ones without a gradient get none. Raises TypeError or ValueError where a parameter or its
    `state` does not fit the settings of its group, or these lie on another device, so that nothing has changed then.
    """
    checked = []
    for group in groups:
        check_live_tensors(group)
        for name, p in zip(names_of(group), group["params"]):
            _check_parameter(name, p, group, replica_ranks)
            if not p.is_meta and (p.requires_grad or p.grad is not None or p in state):
                _check_state(state.get(p, {}), name, p, group, replica_ranks)
                checked.append((group, name, p))
    return checked


def bring_state_(state: dict[str, Tensor], name: str, p: Tensor, group: Group) -> None:
    """Make what `state` of `p` lacks for its group, in place, and bring the rest into its form and place.

    `checked_parameters` has seen them.
    """
    wanted = state_tensors(name, p, group)
    if BUFFER in state and (state[BUFFER].dtype == torch.int8) != (SCALE in wanted):
        _convert_momentum_(state, p, block_axes(view_in_group(name, p, group)), wanted)
    ensure_state(state, p, wanted, memory_beside)


def _check_parameter(name: str, p: Tensor, group: Group, replica_ranks: Optional[Ranks]) -> None:
    check_parameter(name, p, group["use_muon"], group["master_weights"])
    if group["use_muon"] and group["offload"] and layout_of(name, p, replica_ranks) is not None:
        raise ValueError(f"offload is not supported for matrices that ranks share, as {name} is one")


def _check_state(
    state: Mapping[str, Tensor], name: str, p: Tensor, group: Group, replica_ranks: Optional[Ranks]
) -> None:
    """Raise ValueError for shards that cut blocks of momentum in 8 bits, codes without scales, and other shapes.

    And for norms that cannot be kept, where they are to be.
    """
    wanted, keeps_norms = state_tensors(name, p, group), group["use_muon"] and group["experimental_hyperball"]
    layout = layout_of(name, p, replica_ranks) if keeps_norms or SCALE in wanted else None
    if keeps_norms:
        check_norm(name, p, layout is not None)
    if SCALE in wanted and layout is not None:
        check_blocks(name, view_in_group(name, p, group), layout)
    if BUFFER in state and state[BUFFER].dtype == torch.int8 and SCALE not in state:
        raise ValueError(f"state {BUFFER} of {name} is in 8 bits, and its {SCALE} is missing")
    check_shapes(state, p, wanted)


def _convert_momentum_(
    state: dict[str, Tensor], p: Tensor, axes: Sequence[int], wanted: Mapping[str, StateTensor]
) -> None:
    """Bring momentum in `state` of `p` from floating point into 8 bits, with blocks along `axes`, or back."""
    buffer = state[BUFFER]
    if SCALE in wanted:
        codes, scale = quantized(_lines(buffer, axes))
        state[SCALE] = memory_beside(p, wanted[SCALE].shape, torch.float32)
        state[BUFFER] = torch.empty_like(buffer, dtype=torch.int8)
        _fill_(state[BUFFER], codes, axes)
        _fill_(state[SCALE], scale, axes)
    else:
        lines = (_lines(each, axes).to(buffer.device) for each in (buffer, state.pop(SCALE)))
        state[BUFFER] = torch.empty_like(buffer, dtype=wanted[BUFFER].dtype)
        _fill_(state[BUFFER], dequantized(*lines, wanted[BUFFER].dtype), axes)


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
