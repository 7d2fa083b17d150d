"""Checks of the groups of another optimizer's file: what its translation needs, and what it computes with."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Any, Mapping, Optional, Sequence

from torch import Tensor

from ..parameters.setting_values import plain_number_or_tensor
from .state_sources import Source, known_keys

# Keys whose values are numbers in the groups of every source that has them, and those that timm sets to None.
_NUMBERS = {"lr", "initial_lr", "weight_decay", "wd", "momentum", "mu", "eps", "epsilon", "adamw_eps", "beta1", "beta2"}
_NUMBERS |= {"muon_beta2", "safety_factor", "fallback_lr_scale", "adamw_lr"}
_OPTIONAL = {"fallback_lr_scale", "adamw_lr"}


def check_groups(
    what: str, groups: Sequence[Mapping[str, Any]], entries: Sequence[Any], source: Source, advice: str = ""
) -> None:
    """Raise ValueError or TypeError for a group that lacks a key its source always has, or has values of another kind.

    `what` names the file in errors, and `advice` follows what is lacking; `entries` are the file's parameters, with a
    `group` and a `branch`.
    """
    branches: dict[int, set[Optional[str]]] = {}
    for entry in entries:
        branches.setdefault(id(entry.group), set()).add(entry.branch)
    for number, group in enumerate(groups):
        place = f"group {number} of {what}"
        for branch, needed in source.needed.items():
            lacking = [key for key in needed if key not in group and branch in branches.get(id(group), ())]
            if lacking:
                need = f"{', '.join(lacking)}, which it needs for parameters of {branch}"
                raise ValueError(f"{place} has no {need}{advice}")
        for key in known_keys(source):
            if key in group:
                _check_value(f"{key} of {place}", key, group[key])


def _check_value(text: str, key: str, value: Any) -> None:
    if key in _NUMBERS and not (value is None and key in _OPTIONAL):
        plain_number_or_tensor(text, value)
    elif isinstance(value, Tensor) and value.numel() != 1:  # it is neither true nor false
        raise TypeError(f"{text} must not be a tensor of shape {tuple(value.shape)}, got {shortened(value)}")
    if key == "safety_factor" and value == 0:
        raise ValueError(f"{text} must be above 0, got {value}")
