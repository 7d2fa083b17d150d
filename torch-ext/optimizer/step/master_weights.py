"""Export and import of float32 master weights, whose upper halves are the bfloat16 parameters."""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.master_weights import joined, split_
from ..kernels.tracing import is_fake
from ..parameters.names import named_parameters, repeated
from ..parameters.settings import Group
from ..parameters.state import REMAINDER, State, integers
from ..plan.layout import layout_of, local_part
from ..plan.shards import is_whole, part_of_whole
from .change import Change


def master_weights(groups: Sequence[Group], state: State) -> dict[str, Tensor]:
    """Return the float32 value of each parameter that has a remainder, by name, sharded like the parameter."""
    masters = {}
    for name, p in _split_parameters(groups, state).items():
        masters[name] = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
        local_part(masters[name]).copy_(joined(local_part(p), integers(local_part(state[p][REMAINDER]))))
    return masters


def load_master_weights(groups: Sequence[Group], state: State, values: Mapping[str, Tensor], change: Change) -> None:
    """Set each parameter that has a remainder, and the remainder, to its float32 value, in place, as one `change`.

    Values of other names are ignored, and of whole ones each rank takes its part. Raises ValueError or TypeError, with
    nothing changed, if a value is missing or does not fit.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"the masters must be a dict of float32 tensors by name, got {type(values).__name__}")
    parameters = _split_parameters(groups, state)
    missing = [name for name in parameters if name not in values]
    if missing:
        raise ValueError(f"no float32 values were given for {len(missing)} parameters: {', '.join(missing[:5])}")
    for name, p in parameters.items():
        _check_value(name, p, values[name])
    with change.running(of_all=False):  # memory may run out for copies
        for name, p in parameters.items():
            value = values[name].detach()
            value = local_part(part_of_whole(value, p) if is_whole(value, p) else value).to(local_part(p).device)
            split_(local_part(p), integers(local_part(state[p][REMAINDER])), value)


def _split_parameters(groups: Sequence[Group], state: State) -> dict[str, Tensor]:
    """Return the parameters that have a remainder by name; ValueError if two have the same name."""
    named = [pair for group in groups for pair in named_parameters(group)]
    named = [(name, p) for name, p in named if p in state and REMAINDER in state[p]]
    twice = repeated(name for name, _ in named)
    if twice:
        raise ValueError(f"several parameters are called {', '.join(twice[:5])}: each value needs a unique name")
    return dict(named)


def _check_value(name: str, p: Tensor, value: Tensor) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"the master of {name} must be a float32 tensor, got {got}")
    only_fake = is_fake(value) and not is_fake(p)
    if value.is_meta or only_fake or value.layout != torch.strided:
        got = f"{'a fake tensor ' if only_fake else ''}{tuple(value.shape)} {value.layout} on {value.device}"
        raise ValueError(f"the master of {name} must be dense and have values, got {got}")
    if value.shape != p.shape or not (is_whole(value, p) or layout_of(name, value) == layout_of(name, p)):
        raise ValueError(
            f"the master of {name} must be whole, or laid out like the parameter, {_described(p)}, "
            f"got {_described(value)}"
        )


def _described(value: Tensor) -> str:
    placements = getattr(value, "placements", None)
    return f"{tuple(value.shape)}" + ("" if placements is None else f" with placements {placements}")
