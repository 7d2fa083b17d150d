"""Parameter groups: a mixed one is split so that each half has one live `lr`; how they are named, saved and loaded."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from torch import Tensor

from .checks import check_parameter
from .matrices import MatrixView, is_expert, matrix_view
from .routing import IsMuon, bare_name, decide, unique_parameters
from .settings import Group, plain_settings
from .state import STATE_FORMAT, check_loaded

# What a saved group has in the place of a function, which is to be given again.
FUNCTION = "function"


def split_group(
    group: Group, defaults: Group, is_muon: Optional[IsMuon], first: int
) -> tuple[list[dict[str, Any]], dict[Tensor, str]]:
    """Return `group` as one or two groups, each all Muon's or all AdamW's, and why each parameter is where it is.

    `group` holds `params` (tensors or `(name, tensor)` pairs) and settings, of which `defaults` has the rest;
    `use_muon` overrides routing. `lr` of an AdamW group is the group's `adamw_lr`, else its `lr`, else the default
    `adamw_lr`, else the default `lr`. Unnamed parameters are called `param_<first>` and so on; tied ones come once.
    Raises ValueError or TypeError for what cannot be optimized.
    """
    entries = _entries(group)
    changed = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    forced = _forced_branch(changed)
    settings = plain_settings({**defaults, **changed})
    adamw_rates = changed.get("adamw_lr"), changed.get("lr"), defaults["adamw_lr"], settings["lr"]
    learning_rates = {"muon": settings["lr"], "adamw": next(rate for rate in adamw_rates if rate is not None)}
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
    branches = [branch for branch, members in halves.items() if members] or [forced or "adamw"]
    groups = []
    for branch in branches:
        changes = {"use_muon": branch == "muon", "lr": learning_rates[branch], "params": list(halves[branch].items())}
        groups.append({**settings, **changes, "param_names": [], "state_format": STATE_FORMAT})
    return groups, reasons


def view_in_group(name: str, p: Tensor, group: Group) -> MatrixView:
    """Return how `p` is seen as matrices by the settings of its group; ValueError where it cannot be."""
    return matrix_view(
        name,
        p,
        conv_mode=group["conv_mode"],
        normalize_spatial=group["normalize_spatial"],
        experts=is_expert(name, group["expert_keys"]),
        split_rows=group["split_rows"],
    )


def saved_group(group: Group) -> dict[str, Any]:
    """Return what of a group goes into a file, which cannot hold functions."""
    return {**group, "adjust_lr_fn": FUNCTION if callable(group["adjust_lr_fn"]) else group["adjust_lr_fn"]}


def loaded_group(current: dict[str, Any], saved: dict[str, Any], state: Mapping[Tensor, Any]) -> dict[str, Any]:
    """Return the saved group with the names of the `current` one, and its settings where the saved group has none.

    Where momentum lives is a matter of the machine: `offload` stays as it is here.

    `state` is what was loaded, by parameter. Raises ValueError or TypeError where group or state do not fit.
    """
    _check_same_group(current, saved)
    for p in current["params"]:
        check_loaded(state.get(p, {}), p, current["use_muon"])
    kept = {key: current[key] for key in ("params", "param_names", "use_muon", "state_format", "offload")}
    if saved.get("adjust_lr_fn") == FUNCTION:
        adjustment = current["adjust_lr_fn"]
        if not callable(adjustment):
            raise ValueError(f"adjust_lr_fn was a function when the state was saved, and is {adjustment} here")
        kept["adjust_lr_fn"] = adjustment
    return {**plain_settings({**current, **saved, **kept}), **kept}


def names_of(group: Group) -> list[str]:
    """Return the names of a group's parameters; those that a wrapper has appended are called `unnamed_<i>`."""
    names = list(group["param_names"])
    return names + [f"unnamed_{i}" for i in range(len(names), len(group["params"]))]


def _check_same_group(current: Group, saved: Group) -> None:
    """Raise ValueError if `saved` is of another branch or a later format, or has its parameters in another order."""
    if saved.get("state_format", STATE_FORMAT) not in range(1, STATE_FORMAT + 1):
        raise ValueError(f"the state was saved in format {saved['state_format']}, known here are 1 to {STATE_FORMAT}")
    if saved.get("use_muon", current["use_muon"]) != current["use_muon"]:
        names = {True: "Muon", False: "AdamW"}
        raise ValueError(
            f"a group of {len(saved['params'])} parameters was saved for {names[saved['use_muon']]} "
            f"and is {names[current['use_muon']]}'s here: the parameters or their order differ"
        )
    ours, theirs = (list(map(bare_name, group.get("param_names", ()))) for group in (current, saved))
    if ours != theirs and sorted(ours) == sorted(theirs):
        raise ValueError(f"the same parameters were saved in another order: {theirs}, here {ours}")


def _entries(group: Group) -> list:
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("params must keep their order between runs: give a list, not a set")
    entries = [params] if isinstance(params, Tensor) else list(params)
    if "param_names" not in group:
        return entries
    if len(group["param_names"]) != len(entries):
        raise ValueError(f"{len(group['param_names'])} param_names were given for {len(entries)} params")
    return list(zip(group["param_names"], entries))


def _forced_branch(settings: dict[str, Any]) -> Optional[str]:
    """Take `use_muon` and `use_fallback`, its opposite, out of `settings` and return the branch that they ask for."""
    asked = [settings.pop("use_muon", None), settings.pop("use_fallback", None)]
    if any(value not in (True, False, None) for value in asked):
        raise TypeError(f"use_muon and use_fallback must be True, False or None, got {asked}")
    branches = {asked[0], None if asked[1] is None else not asked[1]} - {None}
    if len(branches) > 1:
        raise ValueError(f"use_muon={asked[0]} and use_fallback={asked[1]} contradict each other")
    return {True: "muon", False: "adamw"}[branches.pop()] if branches else None
