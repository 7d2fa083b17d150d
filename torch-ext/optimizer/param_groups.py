"""Parameter groups: settings checked, and a group of mixed parameters split so that each half has one live `lr`."""

from __future__ import annotations

from numbers import Real
from typing import Any, Optional

import torch
from torch import Tensor

from .learning_rate import check_adjustment
from .polar import check_work_dtype
from .routing import IsMuon, check_matrix, decide, unique_parameters
from .schedules import resolve_schedule


def split_group(group: dict[str, Any], is_muon: Optional[IsMuon], named: bool) -> list[dict[str, Any]]:
    """Return `group` as one or two groups, each all Muon's or all AdamW's, with checked settings.

    `group` holds every setting, `params` (tensors or `(name, tensor)` pairs) and maybe `use_muon`, which overrides
    routing, and `adamw_lr`, the `lr` of an AdamW half that the split makes. Names are kept, and made up where `named`
    is true. Tied parameters come once. Raises ValueError or TypeError for what cannot be optimized.
    """
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "adamw_lr")}
    check_settings(settings)
    entries = _entries(group)
    forced = _forced_branch(settings)
    halves: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "adamw": []}
    for names, p in unique_parameters(entries):
        check_parameter(names[0], p)
        if forced == "muon":
            check_matrix(names[0], p)
        branch = forced or decide(names, p, is_muon)[0]
        halves[branch].append((names[0], p))
    if not halves["muon"] and not halves["adamw"]:
        return [{**settings, "params": [], "use_muon": forced == "muon"}]
    groups = []
    for branch, members in halves.items():
        if not members:
            continue
        half = {**settings, "use_muon": branch == "muon"}
        if branch == "adamw" and forced is None and group.get("adamw_lr") is not None:
            half["lr"] = group["adamw_lr"]
        named_here = named or any(isinstance(entry, tuple) for entry in entries)
        half["params"] = members if named_here else [p for _, p in members]
        groups.append(half)
    return groups


def check_settings(settings: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for settings that cannot work; make the rest plain values, in place.

    Plain are numbers, strings, tuples and 0-d tensors: `torch.load(weights_only=True)` reads them back.
    """
    for key in ("lr", "adamw_lr"):
        if settings.get(key) is not None:
            _check_learning_rate(key, settings[key])
    for key in ("weight_decay", "eps", "adamw_eps"):
        _check_number(key, settings[key], 0, float("inf"))
    _check_number("momentum", settings["momentum"], 0, 1)
    betas = settings["adamw_betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"adamw_betas must be two numbers, got {betas!r}")
    for beta in betas:
        _check_number("adamw_betas", beta, 0, 1)
    settings["adamw_betas"] = tuple(betas)
    resolve_schedule(settings["ns_coefficients"], settings["ns_steps"])
    if not isinstance(settings["ns_coefficients"], str):
        settings["ns_coefficients"] = _plain(settings["ns_coefficients"])
    check_adjustment(settings["adjust_lr_fn"])
    settings["ns_dtype"] = dtype_name(settings["ns_dtype"])


def check_parameter(name: str, p: Tensor) -> None:
    """Raise unless `p` can be optimized: a real floating-point leaf whose whole value is here."""
    if p.is_complex() or not p.is_floating_point():
        raise TypeError(f"parameters must be real floating-point tensors, {name} is {p.dtype}")
    if hasattr(p, "device_mesh"):
        raise ValueError(
            f"{name} is sharded (a DTensor), and orthogonalizing a shard is not orthogonalizing the matrix: "
            "sharded parameters are not supported"
        )
    if p.layout != torch.strided:
        raise ValueError(f"parameters must be dense tensors, {name} has layout {p.layout}")


def dtype_name(dtype: torch.dtype | str | None) -> Optional[str]:
    """Return the name of a work dtype given as such or by name, None for None; ValueError for any other."""
    if dtype is None:
        return None
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"ns_dtype must be a torch.dtype or its name, got {dtype!r}")
    return str(check_work_dtype(resolved)).replace("torch.", "")


def _entries(group: dict[str, Any]) -> list:
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
    fallback = settings.pop("use_fallback", None)
    use_muon = settings.pop("use_muon", None if fallback is None else not fallback)
    return None if use_muon is None else ("muon" if use_muon else "adamw")


def _check_learning_rate(key: str, lr) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"{key} must be a number or a tensor of one element, got shape {tuple(lr.shape)}")
    else:
        _check_number(key, lr, 0, float("inf"))


def _check_number(key: str, value, low: float, high: float) -> None:
    """Require a number in [low, high)."""
    if not isinstance(value, Real):
        raise TypeError(f"{key} must be a number, got {value!r}")
    if not low <= value < high:
        raise ValueError(f"{key} must be at least {low} and below {high}, got {value}")


def _plain(values):
    return tuple(_plain(v) if hasattr(v, "__len__") else float(v) for v in values)
