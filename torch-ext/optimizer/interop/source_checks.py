"""Checks of the groups of another optimizer's file: what its translation needs, and what it computes with."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Any, Iterable, Mapping, Sequence

from torch import Tensor

from ..kernels.tracing import lacks_values
from ..parameters.setting_values import plain_number_or_tensor
from .state_matching import Entry
from .state_sources import Source, known_keys

# Keys whose values are numbers in the groups of every source that has them, and those that timm sets to None.
_NUMBERS = {"lr", "initial_lr", "weight_decay", "wd", "momentum", "mu", "eps", "epsilon", "adamw_eps", "beta1", "beta2"}
_NUMBERS |= {"muon_beta2", "safety_factor", "fallback_lr_scale", "adamw_lr"}
_OPTIONAL = {"fallback_lr_scale", "adamw_lr"}


def check_settings(what: str, groups: Sequence[Mapping[str, Any]], source: Source) -> None:
    """Raise ValueError or TypeError for names, or a setting, that the source would not have; `what` names the file."""
    for number, group in enumerate(groups):
        # Distributed checkpoints have names as `params`; what else they call names may be of another pipeline stage.
        if not all(isinstance(key, str) for key in group["params"]):
            for key in ("param_names", "names"):
                _check_names(f"{key} of group {number} of {what}", group.get(key), len(group["params"]))
        for key in known_keys(source):
            if key in group:
                _check_value(f"{key} of group {number} of {what}", key, group[key])


def check_needed(
    files: Iterable[tuple[str, Mapping[str, Any]]], pairs: Iterable[tuple[Entry, Entry]], source: Source, advice: str
) -> None:
    """Raise ValueError if a group of a file lacks a key that its source always has.

    `files` are what errors call them and their state dicts, and `advice` follows what is lacking; `pairs` are a
    parameter and its entry in a file.
    """
    places = {
        id(group): f"group {number} of {what}"
        for what, file in files
        for number, group in enumerate(file["param_groups"])
    }
    for parameter, entry in pairs:
        lacking = [key for key in source.needed.get(parameter.branch, ()) if key not in entry.group]
        if lacking:
            need = f"{', '.join(lacking)}, which it needs for parameters of {parameter.branch}"
            raise ValueError(f"{places[id(entry.group)]} has no {need}{advice}")


def _check_names(text: str, names: Any, count: int) -> None:
    if names is None:
        return
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{text} must be a list of the names of its parameters, got {shortened(names)}")
    if len(names) != count:
        raise ValueError(f"{text} must have a name for each of its {count} parameters, got {len(names)}")


def _check_value(text: str, key: str, value: Any) -> None:
    if key in _NUMBERS and not (value is None and key in _OPTIONAL):
        plain_number_or_tensor(text, value)
    elif isinstance(value, Tensor) and (value.numel() != 1 or lacks_values(value)):  # it is neither true nor false
        kind = f"a tensor of shape {tuple(value.shape)} on {value.device}"
        raise TypeError(f"{text} must not be {kind}, got {shortened(value)}")
    if key == "safety_factor" and value == 0:
        raise ValueError(f"{text} must be above 0, got {value}")
