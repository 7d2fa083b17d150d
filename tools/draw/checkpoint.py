"""What a checkpoint says of the optimizer: each parameter's branch, shape and state, by name."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOMENTUM = "momentum_buffer"
# What every group of Muon's state has; other optimizers that call it muon have no fallback.
KEYS = {"use_muon", "fallback", "params", "param_names"}


@dataclass(frozen=True)
class Entry:
    """One parameter: `branch` is `muon`, or the fallback's."""

    name: str
    branch: str
    state: dict[str, Tensor]

    @property
    def is_muon(self) -> bool:
        return self.branch == "muon"

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's, which is that of its largest state."""
        return max((tuple(value.shape) for value in self.state.values()), key=math.prod, default=())

    @property
    def elements(self) -> int:
        """How many the parameter has; 0 without a state, which tells nothing of its shape."""
        return math.prod(self.shape) if self.state else 0


def read_checkpoint(path: Path) -> list[Entry]:
    """Return the parameters of a file of `torch.save(opt.state_dict(), path)`, or of a dict that has it somewhere.

    ValueError for a file that has no state of Muon, or none that loads without running code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, UnicodeDecodeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is no checkpoint that torch.load reads: {reason}") from None
    state_dict = _optimizer_of(content)
    if state_dict is None:
        keys = list(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} has no state of Muon: it needs opt.state_dict(), or a dict with it, got {keys}")
    return [
        Entry(name, "muon" if group["use_muon"] else group["fallback"], _tensors(state_dict["state"].get(position, {})))
        for group in state_dict["param_groups"]
        for name, position in zip(group["param_names"], group["params"])
    ]


def _optimizer_of(content: Any) -> dict[str, Any] | None:
    """Return the state dict of Muon that `content` is or has among its values."""
    if not isinstance(content, dict):
        return None
    groups = content.get("param_groups")
    if "state" in content and isinstance(groups, list):
        return content if all(isinstance(group, dict) and group.keys() >= KEYS for group in groups) else None
    return next(filter(None, map(_optimizer_of, content.values())), None)


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
