"""What other Muons keep: the names of their settings and state, what they mean here, and what they never save."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ..schedules import resolve_schedule

Group = Mapping[str, Any]
Settings = dict[str, Any]

# Keys that say where a parameter goes or how a step is computed, not what it is.
_UNRELATED = {"params", "param_names", "names", "use_muon", "use_fallback", "algorithm", "step", "initial_lr"}
_UNRELATED |= {"foreach", "fused", "capturable", "differentiable", "verbose", "none_grad"}
# Of other keys None, False and these say that something is off.
_OFF = {"decoupled_weight_decay": True, "algo": "muon"}


class Source(NamedTuple):
    """One optimizer; tables are by branch, `muon` or `adamw`, from our key to its own."""

    settings: dict[str, dict[str, str]]
    state: dict[str, dict[str, str]]
    branch_of: Callable[[Group, Mapping[str, Any]], Optional[str]]  # from a parameter's group and state
    complete: Callable[[Settings, Group, str], Settings]  # makes ours of settings copied from a group
    read: frozenset[str] = frozenset()  # other keys of a group that `complete` reads
    sums: bool = False  # momentum is momentum * sum + gradient, not an average
    sorts: bool = False  # matrices come largest first
    unsaid: tuple[str, ...] = ()  # settings of matrices that no group holds


def settings_of(group: Group, branch: str, source: Source) -> Settings:
    """Return the settings of a group of `source` as ours, for its parameters of `branch`."""
    keys = {**source.settings[branch], "initial_lr": "initial_lr"}
    copied = {ours: group[theirs] for ours, theirs in keys.items() if theirs in group}
    return source.complete(copied, group, branch)


def without_counterpart(group: Group, branch: str, source: Source) -> list[str]:
    """Return what a group of `source` says that `settings_of` has no word for, unless it says that it is off."""
    known = {key for table in source.settings.values() for key in table.values()} | source.read | _UNRELATED
    found = {key: v for key, v in group.items() if key not in known and v is not None and v != _OFF.get(key, False)}
    settings = settings_of(group, branch, source)
    for ours, theirs in source.settings[branch].items():
        if theirs in group and ours not in settings:
            found[theirs] = group[theirs]
    return [f"{key}={value!r}" for key, value in found.items()]


def as_ours(state: Mapping[str, Any], group: Group, branch: str, source: Source) -> dict[str, Tensor]:
    """Return the state of one parameter under our keys and in our scale."""
    own = {ours: state[theirs] for ours, theirs in source.state[branch].items()}
    if branch == "adamw":
        own["step"] = torch.as_tensor(own["step"], dtype=torch.float32)
    elif source.sums:
        own["momentum_buffer"] = own["momentum_buffer"] * (1 - group[source.settings["muon"]["momentum"]])
    return own


def _same(*keys: str) -> dict[str, str]:
    return {key: key for key in keys}


def _by_flag(group: Group, state: Mapping[str, Any]) -> Optional[str]:
    return "muon" if group.get("use_muon", True) else "adamw"


def _timm_branch(group: Group, state: Mapping[str, Any]) -> Optional[str]:
    # What has had a gradient is noted in the state; else shapes decide, unless the group does.
    forced = False if group.get("use_fallback") else group.get("use_muon")
    flag = state.get("use_muon", forced)
    return None if flag is None else "muon" if flag else "adamw"


def _torch(settings: Settings, group: Group, branch: str) -> Settings:
    return settings if branch == "muon" else {**settings, "fallback": "adamw"}


def _timm(settings: Settings, group: Group, branch: str) -> Settings:
    if branch == "adamw":
        scale = group.get("fallback_lr_scale")
        if scale is None:  # older versions have a learning rate of its own
            base = group.get("initial_lr", group["lr"])
            scale = group["adamw_lr"] / base if group.get("adamw_lr") is not None and base else 1.0
        scaled = {key: settings[key] * scale for key in ("lr", "initial_lr") if key in settings}
        return {**settings, **scaled, "fallback": "nadamw" if group["nesterov"] else "adamw"}
    s = group.get("safety_factor", 1.0)
    if s != 1:
        # The norm is multiplied by s before eps bounds it: what slows the first step is a change of its argument.
        (a, b, c), *rest = resolve_schedule(settings["ns_coefficients"], settings["ns_steps"])
        settings = {**settings, "ns_coefficients": ((a / s, b / s**3, c / s**5), *rest), "eps": settings["eps"] / s}
    if not settings.get("adjust_lr_fn"):  # no multiplier at all
        settings = {key: value for key, value in settings.items() if key != "adjust_lr_fn"}
    return settings


def _keller_jordan(settings: Settings, group: Group, branch: str) -> Settings:
    if branch == "adamw":
        return {**settings, "fallback": "adamw"}
    recipe = dict(ns_coefficients="original", ns_steps=5, eps=1e-7, adjust_lr_fn="original")
    return {**settings, "nesterov": True, **recipe}


def _motif(settings: Settings, group: Group, branch: str) -> Settings:
    if branch == "adamw":
        return {**settings, "fallback": "adamw"}
    # 1e-7 is added to the norm of the sum, which is 1 / (1 - momentum) times that of the average.
    return {**settings, "adjust_lr_fn": "match_rms_adamw", "eps": (1 - group["momentum"]) * 1e-7}


def _dion(settings: Settings, group: Group, branch: str) -> Settings:
    if branch == "adamw":
        return {**settings, "adamw_betas": (group["beta1"], group["beta2"]), "fallback": "adamw"}
    # As for motif; its spectral_norm is the factor sqrt(rows / cols).
    multiplier = {"spectral_norm": "rms_to_rms", "rms_norm": "match_rms_adamw"}.get(settings.pop("adjust_lr_fn"))
    settings = {**settings, "eps": (1 - group["mu"]) * settings["eps"]}
    if group.get("flatten"):
        settings["conv_mode"] = "flatten"
    return settings if multiplier is None else {**settings, "adjust_lr_fn": multiplier}


_SHARED = _same("lr", "weight_decay", "momentum", "nesterov")
_ADAMW = {**_same("lr", "weight_decay"), "adamw_betas": "betas", "adamw_eps": "eps"}
_STATE = {"muon": _same("momentum_buffer"), "adamw": _same("step", "exp_avg", "exp_avg_sq")}
_RECIPE = _same("ns_coefficients", "ns_steps", "adjust_lr_fn", "eps")

SOURCES = {
    # torch/optim/_muon.py and torch/optim/adamw.py, torch 2.13
    "torch": Source(
        {"muon": {**_SHARED, **_RECIPE}, "adamw": {**_ADAMW, "maximize": "maximize"}},
        _STATE,
        lambda group, state: "muon",
        _torch,
    ),
    # timm/optim/muon.py, timm 1.0.31
    "timm": Source(
        {"muon": {**_SHARED, **_RECIPE, **_same("conv_mode", "normalize_spatial")}, "adamw": _ADAMW},
        _STATE,
        _timm_branch,
        _timm,
        read=frozenset({"fallback_lr_scale", "adamw_lr", "safety_factor"}),
    ),
    # https://github.com/KellerJordan/Muon, muon.py of the package muon-optimizer 0.1.0
    "keller_jordan": Source(
        {"muon": _same("lr", "weight_decay", "momentum"), "adamw": _ADAMW}, _STATE, _by_flag, _keller_jordan, sorts=True
    ),
    # motif-technologies/optimizer on the Hub, muon.py
    "motif": Source(
        {"muon": {**_SHARED, **_same("ns_steps")}, "adamw": _same("lr", "weight_decay", "adamw_betas", "adamw_eps")},
        {"muon": _same("momentum_buffer"), "adamw": {"step": "step", "exp_avg": "moment1", "exp_avg_sq": "moment2"}},
        _by_flag,
        _motif,
        sums=True,
        unsaid=("ns_coefficients",),
    ),
    # https://github.com/microsoft/dion, dion/muon.py, 0a059a4
    "dion": Source(
        {
            "muon": {**_SHARED, "momentum": "mu", "eps": "epsilon", "adjust_lr_fn": "adjust_lr"},
            "adamw": {**_same("lr", "weight_decay"), "adamw_eps": "epsilon"},
        },
        {
            "muon": {"momentum_buffer": "momentum"},
            "adamw": {"step": "step", "exp_avg": "momentum", "exp_avg_sq": "variance"},
        },
        lambda group, state: group.get("algorithm", "muon"),
        _dion,
        read=frozenset({"beta1", "beta2", "flatten"}),
        sums=True,
        unsaid=("ns_coefficients", "ns_steps"),
    ),
}
