"""Optimizer state of a parameter: which tensors it has, how they come about, and which saved ones fit."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import Tensor

# The keys of torch.optim.Muon and torch.optim.AdamW.
MUON_KEYS = ("momentum_buffer",)
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")


def ensure_state(state: dict[str, Tensor], p: Tensor, use_muon: bool) -> None:
    """Make what is missing in `state`, in place, and move the rest to where `p` is.

    A momentum buffer keeps its dtype when the parameter is cast; AdamW's fused kernel needs one dtype. Raises
    ValueError where a tensor no longer has the parameter's shape.
    """
    check_shapes(state, p)
    for key in MUON_KEYS if use_muon else ADAMW_KEYS:
        if key == "step":
            state[key] = state.get(key, torch.zeros((), dtype=torch.float32, device=p.device)).to(p.device)
        elif key not in state:
            state[key] = torch.zeros_like(p, requires_grad=False)
        else:
            state[key] = state[key].to(p.device, state[key].dtype if use_muon else p.dtype)


def check_shapes(state: Mapping[str, Any], p: Tensor) -> None:
    """Raise ValueError if a state tensor has another shape than its parameter; counts have none."""
    for key, value in state.items():
        if isinstance(value, Tensor) and key != "step" and value.shape != p.shape:
            raise ValueError(f"state {key} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}")


def check_loaded(state: Mapping[str, Any], p: Tensor, use_muon: bool) -> None:
    """Raise ValueError unless a loaded state is that of the parameter's branch, or empty."""
    wanted = MUON_KEYS if use_muon else ADAMW_KEYS
    if state and set(state) != set(wanted):
        raise ValueError(
            f"a parameter {tuple(p.shape)} of {'Muon' if use_muon else 'AdamW'} needs the state {', '.join(wanted)}, "
            f"got {', '.join(map(str, state))}"
        )
    check_shapes(state, p)
