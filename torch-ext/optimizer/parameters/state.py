"""Optimizer state of a parameter: which tensors it has, how they come about, and which saved ones fit."""

from __future__ import annotations

from numbers import Real
from typing import Any, Mapping

import torch
from torch import Tensor

from .offload import host_zeros_like

# In every saved group: of the keys and meanings of groups and state. A change that older files do not fit raises it.
STATE_FORMAT = 1
# The keys of torch.optim.Muon and torch.optim.AdamW.
MUON_KEYS = ("momentum_buffer",)
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")


def ensure_state(state: dict[str, Tensor], p: Tensor, group: Mapping[str, Any]) -> None:
    """Make what `state` of `p` lacks for the branch of its group, in place, and move the rest to where it belongs.

    That is where `p` is, and host memory for momentum buffers of groups with `offload`. They are made in the group's
    `momentum_dtype`, None for the parameter's, and keep their dtype when the parameter is cast; AdamW's fused kernel
    needs one dtype. Raises ValueError where a tensor no longer has the parameter's shape.
    """
    check_shapes(state, p)
    use_muon, name = group["use_muon"], group["momentum_dtype"]
    dtype = getattr(torch, name) if use_muon and name is not None else p.dtype
    host = group["offload"] and use_muon
    for key in MUON_KEYS if use_muon else ADAMW_KEYS:
        if key == "step":
            state[key] = state.get(key, torch.zeros((), dtype=torch.float32, device=p.device)).to(p.device)
        elif key not in state:
            make = host_zeros_like if host else torch.zeros_like
            state[key] = make(p, dtype=dtype).requires_grad_(False)
        else:
            state[key] = laid_out_like(p, state[key], state[key].dtype if use_muon else p.dtype, host)


def laid_out_like(p: Tensor, value: Tensor, dtype: torch.dtype, host: bool = False, copy: bool = False) -> Tensor:
    """Return `value` in `dtype`, with the strides of `p` and where it is; itself where it is that, unless `copy`.

    With `host` it is in host memory, pinned where `p` is on a GPU.
    """
    alike = value.stride() == p.stride()
    if host:
        on_host = value.device.type == "cpu" and value.is_pinned() == p.is_cuda
        unchanged = alike and on_host and value.dtype == dtype
        return value if unchanged and not copy else host_zeros_like(p, dtype).copy_(value)
    if alike and value.device == p.device:
        return value.to(dtype=dtype, copy=copy)
    return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(value)


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
    for key, value in state.items():
        if not isinstance(value, (Tensor, Real) if key == "step" else Tensor):
            raise ValueError(f"state {key} of a parameter {tuple(p.shape)} must be a tensor, got {value!r}")
    check_shapes(state, p)
