"""Checks of parameters."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..iteration import DTYPES

# What wrappers that make one flat vector of many parameters put on the vector, or on the parameters.
_FLATTENED = {
    **dict.fromkeys(("_is_flat_param", "_fsdp_flattened"), "FSDP1 (FullyShardedDataParallel)"),
    **dict.fromkeys(("ds_id", "ds_shape"), "DeepSpeed's ZeRO"),
}


def check_parameter(name: str, p: Tensor, use_muon: bool, master_weights: Optional[str] = None) -> None:
    """Raise unless `p` can be optimized: dense, of one of `DTYPES`, not part of a flat vector; a matrix for Muon.

    With `master_weights` it must not be float16, of which no 16 bits make float32.
    """
    if p.dtype not in DTYPES:
        raise TypeError(
            f"parameters must be {', '.join(map(str, DTYPES))}, {name} is {p.dtype}: leave it out, as [(name, p) for "
            "name, p in model.named_parameters() if p.requires_grad] leaves out what is quantized and frozen"
        )
    if master_weights is not None and p.dtype == torch.float16:
        raise ValueError(
            f"master_weights={master_weights!r} keeps what bfloat16 lacks of float32 in 16 bits, and {name} is "
            "float16, which has other exponents: train it in bfloat16, or in a group with master_weights=None"
        )
    wrapper = next((wrapper for attribute, wrapper in _FLATTENED.items() if hasattr(p, attribute)), None)
    if wrapper is not None:
        raise ValueError(
            f"{name} belongs to {wrapper}, which cuts a flat vector of many parameters: what it leaves, of shape "
            f"{tuple(p.shape)}, is not a matrix, and AdamW in its place would be another optimizer. Muon needs whole "
            "parameters, as DistributedDataParallel leaves them, or shards of them, as FSDP2 does: use fully_shard "
            "instead of FullyShardedDataParallel, and DeepSpeed's stage 0"
        )
    if p.layout != torch.strided:
        raise ValueError(f"parameters must be dense tensors, {name} has layout {p.layout}")
    if use_muon:
        check_matrix(name, p)


def check_trainable(name: str, p: Tensor) -> None:
    """Raise ValueError for what gets no gradient, though it looks like a parameter."""
    if p.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode, where nothing can be trained: make it outside")
    if not p.is_leaf and not p.retains_grad:
        raise ValueError(
            f"{name} is a non-leaf tensor, computed from others, which gets no gradient: give the nn.Parameter that it "
            "was computed from, or .detach().requires_grad_() of it"
        )


def check_matrix(name: str, p: Tensor) -> None:
    """Raise ValueError unless `p`, asked for by the user, can be seen as matrices."""
    if p.ndim < 2 or 0 in p.shape:
        raise ValueError(
            f"Muon was asked for {name}, which is not a matrix: its shape is {tuple(p.shape)}. Leave use_muon out of "
            "its group for AdamW (wrappers that flatten parameters, such as FSDP1 and DeepSpeed's ZeRO, leave no "
            "matrices: use FSDP2 or stage 0)"
        )


def check_norm(name: str, p: Tensor, is_shared: bool) -> None:
    """Raise ValueError where steps cannot keep the norms of the matrices of `p`.

    That is in 16 bits, whose roundings change a norm, and where it is 0. Parts that ranks share are not looked at.
    """
    if p.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"experimental_hyperball needs float32 or float64 matrices, {name} is {p.dtype}")
    if not is_shared and not p.is_meta and not p.any():
        raise ValueError(f"experimental_hyperball keeps norms of matrices, but {name} is zero: give it values first")
