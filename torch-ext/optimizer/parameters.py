"""What a parameter and its gradient must be, to be optimized at all."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)

# What wrappers that make one flat vector of many parameters put on the vector, or on the parameters.
_FLATTENED = {
    **dict.fromkeys(("_is_flat_param", "_fsdp_flattened"), "FSDP1 (FullyShardedDataParallel)"),
    **dict.fromkeys(("ds_id", "ds_shape"), "DeepSpeed's ZeRO"),
}


class GradientScaling(NamedTuple):
    """What `torch.amp.GradScaler` says of gradients: what they were multiplied with, and 1 if they overflowed.

    Float32 tensors of one element on the device of the parameters, or None.
    """

    grad_scale: Optional[Tensor]
    found_inf: Optional[Tensor]


UNSCALED = GradientScaling(None, None)


def check_parameter(name: str, p: Tensor, use_muon: bool) -> None:
    """Raise unless `p` can be optimized: dense, of one of `DTYPES`, of its own; a matrix for Muon."""
    if p.dtype not in DTYPES:
        raise TypeError(f"parameters must be {', '.join(map(str, DTYPES))}, {name} is {p.dtype}")
    wrapper = next((wrapper for attribute, wrapper in _FLATTENED.items() if hasattr(p, attribute)), None)
    if wrapper is not None:
        raise ValueError(
            f"{name} belongs to {wrapper}, which cuts a flat vector of many parameters: what it leaves, of shape "
            f"{tuple(p.shape)}, is no matrix, and AdamW in its place would be another optimizer. Muon needs whole "
            "parameters, as those of DistributedDataParallel are, or shards of them, as those of FSDP2"
        )
    if p.layout != torch.strided:
        raise ValueError(f"parameters must be dense tensors, {name} has layout {p.layout}")
    if use_muon:
        check_matrix(name, p)


def check_matrix(name: str, p: Tensor) -> None:
    """Raise ValueError unless `p`, asked for by the user, can be seen as matrices."""
    if p.ndim < 2 or 0 in p.shape:
        raise ValueError(
            f"Muon was asked for {name}, which is no matrix: its shape is {tuple(p.shape)} "
            "(wrappers that flatten parameters, such as FSDP1 and DeepSpeed's ZeRO, leave no matrices)"
        )


def check_gradient(p: Tensor) -> None:
    """Raise ValueError unless the gradient of `p` is dense and has its shape, which `p` itself may have lost."""
    if p.grad.layout != torch.strided or p.grad.shape != p.shape:
        raise ValueError(
            f"gradients must be dense and of their parameter's shape {tuple(p.shape)}, "
            f"got {tuple(p.grad.shape)}, {p.grad.layout}"
        )
