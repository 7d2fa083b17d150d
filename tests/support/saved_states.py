"""State files of released versions, as JSON: written by the code of their time, loaded by that of today.

`python -m tools.release.saved_states` writes the file of a built version. It has, for each case, what a user has kept
(parameters and state dict) and what came next (gradients, and the values after a step with them).
"""

from __future__ import annotations

import base64
from types import ModuleType
from typing import Any

import torch
from torch.nn import Parameter

# Rows of two blocks of 8-bit momentum; a matrix of either orientation; what AdamW updates.
SHAPES = {"wte.weight": (5, 6), "up.weight": (8, 6), "up.bias": (8,), "down.weight": (4, 72), "norm.weight": (6,)}
# float32 products, which every processor has.
COMMON = {"lr": 0.02, "ns_dtype": "float32"}
CASES: dict[str, dict[str, Any]] = {
    "two rates": {"adamw_lr": 0.005, "weight_decay": 0.2},
    "8-bit momentum": {"momentum_dtype": "int8"},
    "second moments": {"second_moment": "rows"},
    "master weights": {"master_weights": "split"},
}
STEPS = 3  # before the state is saved


def dtype_of(case: str) -> torch.dtype:
    return torch.bfloat16 if "master_weights" in CASES[case] else torch.float32


def tensors(case: str, seed: int) -> dict[str, torch.Tensor]:
    """Return random tensors like the parameters of a case."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype_of(case)) for name, shape in SHAPES.items()}


def take_step(optimizer: torch.optim.Optimizer, params: dict[str, Parameter], gradients: dict[str, torch.Tensor]):
    """Take one step, and return the values of all parameters after it: float32 ones where the state has such."""
    for name, p in params.items():
        p.grad = gradients[name].clone()
    optimizer.step()
    after = {name: p.detach().clone() for name, p in params.items()}
    return {**after, **(optimizer.master_weights() if hasattr(optimizer, "master_weights") else {})}


def record(kernel: ModuleType, case: str) -> dict[str, Any]:
    """Train as a case says, and return what a user would save, the gradients of the next step, and its result."""
    params = {name: Parameter(value) for name, value in tensors(case, 0).items()}
    optimizer = kernel.Muon(params.items(), **COMMON, **CASES[case])
    for seed in range(1, 1 + STEPS):
        take_step(optimizer, params, tensors(case, seed))
    saved = {
        "parameters": {name: p.detach().clone() for name, p in params.items()},
        "state_dict": torch.utils._pytree.tree_map(
            lambda value: value.clone() if isinstance(value, torch.Tensor) else value, optimizer.state_dict()
        ),
        "gradients": tensors(case, 1 + STEPS),
    }
    return {**saved, "after": take_step(optimizer, params, saved["gradients"])}


def plain(value: Any) -> Any:
    """Return `value` in the types of JSON; `restored` is the inverse."""
    if isinstance(value, torch.Tensor):
        data = base64.b64encode(bytes(value.contiguous().view(-1).view(torch.uint8).tolist())).decode()
        return {"tensor": data, "dtype": str(value.dtype).replace("torch.", ""), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"items": [[plain(key), plain(entry)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [plain(entry) for entry in value]}
    return value


def restored(value: Any) -> Any:
    """Return what `plain` was given."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        data = torch.tensor(list(base64.b64decode(value["tensor"])), dtype=torch.uint8)
        return data.view(getattr(torch, value["dtype"])).view(value["shape"])
    if "items" in value:
        return {restored(key): restored(entry) for key, entry in value["items"]}
    ((kind, entries),) = value.items()
    return {"list": list, "tuple": tuple}[kind](map(restored, entries))
