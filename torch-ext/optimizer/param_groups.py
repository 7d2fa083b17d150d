"""Parameter groups: settings checked and made plain, and mixed groups split so that each half has one live `lr`."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from .iteration import METHODS, check_work_dtype
from .learning_rate import check_adjustment
from .matrices import CONV_MODES, MatrixView, is_expert, matrix_view, plain_split_rows
from .parameters import check_parameter
from .routing import IsMuon, bare_name, decide, unique_parameters
from .rules.descent import DECAY_MODES
from .schedules import resolve_schedule
from .state import STATE_FORMAT, check_loaded

# The settings that the plan depends on, and those that matrices of one batch share, whatever their values.
PLANNED = (
    "use_muon", "ns_coefficients", "ns_steps", "ns_dtype", "ns_method", "adjust_lr_fn", "conv_mode",
    "normalize_spatial", "expert_keys", "split_rows", "offload",
)  # fmt: skip
RECIPE = ("momentum", "nesterov", "maximize", "eps", "decay_mode", "stochastic_rounding")
FALLBACKS = ("adamw", "nadamw")
# What a saved group has in the place of a function, which is to be given again.
FUNCTION = "function"

_CHOICES = {"decay_mode": DECAY_MODES, "fallback": FALLBACKS, "ns_method": METHODS, "conv_mode": CONV_MODES}
_FLAGS = ("nesterov", "maximize", "normalize_spatial", "stochastic_rounding", "offload", "capturable")
_BELOW = {"momentum": 1.0, "eps": math.inf, "adamw_eps": math.inf}


def split_group(
    group: Mapping[str, Any], defaults: Mapping[str, Any], is_muon: Optional[IsMuon], first: int
) -> tuple[list[dict[str, Any]], dict[Tensor, str]]:
    """Return `group` as one or two groups, each all Muon's or all AdamW's, and why each parameter is where it is.

    `group` holds `params` (tensors or `(name, tensor)` pairs) and settings, of which `defaults` has the rest;
    `use_muon` overrides routing. `lr` of an AdamW group is the group's `adamw_lr`, else its `lr`, else the default
    `adamw_lr`, else the default `lr`. Unnamed parameters are called `param_<first>` and so on; tied ones come once.
    Raises ValueError or TypeError for what cannot be optimized.
    """
    entries = _entries(group)
    own = {key: value for key, value in group.items() if key not in ("params", "param_names", "adamw_lr")}
    forced = _forced_branch(own)
    settings = plain_settings({**defaults, **own})
    learning_rates = {
        "muon": settings["lr"],
        "adamw": _first_given(group.get("adamw_lr"), own.get("lr"), defaults["adamw_lr"], settings["lr"]),
    }
    halves: dict[str, dict[str, Tensor]] = {"muon": {}, "adamw": {}}
    reasons = {}
    for names, p in unique_parameters(entries, first):
        experts = is_expert(names[0], settings["expert_keys"])
        branch, reasons[p] = (forced, "use_muon") if forced else decide(names, p, is_muon, experts)
        check_parameter(names[0], p, branch == "muon")
        if branch == "muon":
            view_in_group(names[0], p, settings)  # raises where it cannot be
        if names[0] in halves["muon"] or names[0] in halves["adamw"]:
            raise ValueError(f"two parameters are called {names[0]}")
        halves[branch][names[0]] = p
    kept = [branch for branch, members in halves.items() if members] or [forced or "adamw"]
    groups = []
    for branch in kept:
        changes = {"use_muon": branch == "muon", "lr": learning_rates[branch], "params": list(halves[branch].items())}
        groups.append({**settings, **changes, "param_names": [], "state_format": STATE_FORMAT})
    return groups, reasons


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` as plain values: numbers, strings, tuples and 0-d tensors, which weights_only loading reads.

    Raises ValueError or TypeError for settings that cannot work.
    """
    if "betas" in settings:
        raise ValueError("betas are called adamw_betas here")
    plain = dict(settings)
    for key in ("lr", "weight_decay", "adamw_lr"):
        if not (key == "adamw_lr" and plain.get(key) is None):
            plain[key] = _live_number(key, plain[key])
    for key, below in _BELOW.items():
        plain[key] = _number(key, plain[key], below)
    betas = plain["adamw_betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"adamw_betas must be two numbers, got {betas!r}")
    plain["adamw_betas"] = tuple(_number("adamw_betas", beta, 1) for beta in betas)
    for key, choices in _CHOICES.items():
        if plain[key] not in choices:
            raise ValueError(f"{key} must be one of {', '.join(choices)}, got {plain[key]!r}")
    for key in _FLAGS:
        if not isinstance(plain[key], bool):
            raise TypeError(f"{key} must be True or False, got {plain[key]!r}")
    if plain["stochastic_rounding"] and plain["capturable"]:
        raise ValueError("stochastic_rounding draws new seeds at every step, and a captured step would repeat them")
    if plain["offload"] and plain["capturable"]:
        raise ValueError("offload brings momentum at every step anew, which a captured step cannot do")
    plain["split_rows"] = plain_split_rows(plain["split_rows"])
    plain["expert_keys"] = _names("expert_keys", plain["expert_keys"])
    if isinstance(plain["ns_steps"], Integral) and not isinstance(plain["ns_steps"], bool):
        plain["ns_steps"] = int(plain["ns_steps"])
    if not isinstance(plain["ns_coefficients"], str):
        plain["ns_coefficients"] = _as_tuples(plain["ns_coefficients"])
    resolve_schedule(plain["ns_coefficients"], plain["ns_steps"])
    check_adjustment(plain["adjust_lr_fn"])
    for key in ("ns_dtype", "momentum_dtype"):
        plain[key] = dtype_name(key, plain[key])
    return plain


def view_in_group(name: str, p: Tensor, group: Mapping[str, Any]) -> MatrixView:
    """Return how `p` is seen as matrices by the settings of its group; ValueError where it cannot be."""
    return matrix_view(
        name,
        p,
        conv_mode=group["conv_mode"],
        normalize_spatial=group["normalize_spatial"],
        experts=is_expert(name, group["expert_keys"]),
        split_rows=group["split_rows"],
    )


def saved_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a group goes into a file, which cannot hold functions."""
    return {**group, "adjust_lr_fn": FUNCTION if callable(group["adjust_lr_fn"]) else group["adjust_lr_fn"]}


def loaded_group(own: dict[str, Any], saved: dict[str, Any], state: Mapping[Tensor, Any]) -> dict[str, Any]:
    """Return the saved group with the names of `own`, and with its settings where the saved one has none.

    Where momentum lives is a matter of the machine: `offload` stays as it is here.

    `state` is what was loaded, by parameter. Raises ValueError or TypeError where group or state do not fit.
    """
    _check_same_group(own, saved)
    for p in own["params"]:
        check_loaded(state.get(p, {}), p, own["use_muon"])
    kept = {key: own[key] for key in ("params", "param_names", "use_muon", "state_format", "offload")}
    if saved.get("adjust_lr_fn") == FUNCTION:
        if not callable(own["adjust_lr_fn"]):
            raise ValueError(f"adjust_lr_fn was a function when the state was saved, and is {own['adjust_lr_fn']} here")
        kept["adjust_lr_fn"] = own["adjust_lr_fn"]
    return {**plain_settings({**own, **saved, **kept}), **kept}


def names_of(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters; those that a wrapper has appended have none of their own."""
    names = list(group["param_names"])
    return names + [f"unnamed_{i}" for i in range(len(names), len(group["params"]))]


def work_dtype_of(group: Mapping[str, Any]) -> Optional[torch.dtype]:
    """Return the work dtype that a group asks for, None where it leaves it to the device."""
    name = dtype_name("ns_dtype", group["ns_dtype"])  # which a user may have set anew
    return None if name is None else getattr(torch, name)


def dtype_name(key: str, dtype: torch.dtype | str | None) -> Optional[str]:
    """Return the name of a dtype given as such or by name, None for None; ValueError for one that is no work dtype."""
    if dtype is None:
        return None
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"{key} must be a torch.dtype or its name, got {dtype!r}")
    return str(check_work_dtype(resolved)).replace("torch.", "")


def _check_same_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError if `saved` is of another branch or a later format, or has its parameters in another order."""
    if saved.get("state_format", STATE_FORMAT) not in range(1, STATE_FORMAT + 1):
        raise ValueError(f"the state was saved in format {saved['state_format']}, known here are 1 to {STATE_FORMAT}")
    if saved.get("use_muon", own["use_muon"]) != own["use_muon"]:
        names = {True: "Muon", False: "AdamW"}
        raise ValueError(
            f"a group of {len(saved['params'])} parameters was saved for {names[saved['use_muon']]} "
            f"and is {names[own['use_muon']]}'s here: the parameters or their order differ"
        )
    ours, theirs = (list(map(bare_name, group.get("param_names", ()))) for group in (own, saved))
    if ours != theirs and sorted(ours) == sorted(theirs):
        raise ValueError(f"the same parameters were saved in another order: {theirs}, here {ours}")


def _entries(group: Mapping[str, Any]) -> list:
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("params must keep their order between runs: give a list, not a set")
    entries = [params] if isinstance(params, Tensor) else list(params)
    if "param_names" not in group:
        return entries
    if len(group["param_names"]) != len(entries):
        raise ValueError(f"{len(group['param_names'])} param_names were given for {len(entries)} params")
    return list(zip(group["param_names"], entries))


def _forced_branch(own: dict[str, Any]) -> Optional[str]:
    """Take `use_muon` and `use_fallback`, its opposite, out of `own` and return the branch that they ask for."""
    asked = [own.pop("use_muon", None), own.pop("use_fallback", None)]
    if any(value not in (True, False, None) for value in asked):
        raise TypeError(f"use_muon and use_fallback must be True, False or None, got {asked}")
    branches = {asked[0], None if asked[1] is None else not asked[1]} - {None}
    if len(branches) > 1:
        raise ValueError(f"use_muon={asked[0]} and use_fallback={asked[1]} contradict each other")
    return {True: "muon", False: "adamw"}[branches.pop()] if branches else None


def _first_given(*values):
    return next(value for value in values if value is not None)


def _live_number(key: str, value):
    if not isinstance(value, Tensor):
        return _number(key, value, math.inf)
    if value.numel() != 1 or value.dtype not in (torch.float32, torch.float64):
        given = f"{tuple(value.shape)} {value.dtype}"
        raise ValueError(f"{key} must be a number or a float32 or float64 tensor of one element, got {given}")
    return value


def _names(key: str, names) -> tuple[str, ...]:
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"{key} must be names, got {names!r}")
    return tuple(names)


def _number(key: str, value, high: float) -> float:
    """Return a number of [0, high) as a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{key} must be a number, got {value!r}")
    if not 0 <= value < high:
        raise ValueError(f"{key} must be at least 0 and below {high}, got {value}")
    return float(value)


def _as_tuples(values):
    return tuple(_as_tuples(v) if hasattr(v, "__iter__") and not isinstance(v, str) else v for v in values)
