"""File formats of other Muons: the names of their settings and state, and constants that they do not save."""

from __future__ import annotations

from numbers import Real
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ..schedules import resolve_schedule, scaled_argument

Group = Mapping[str, Any]
Settings = dict[str, Any]

# Keys that are not settings: they name parameters, choose a branch or an implementation, or count steps.
_UNRELATED = {"params", "param_names", "names", "name", "use_muon", "use_fallback", "algorithm", "step", "initial_lr"}
_UNRELATED |= {"max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}  # torch's schedulers write them
_UNRELATED |= {"foreach", "fused", "capturable", "differentiable", "verbose", "none_grad", "use_addmm", "ns_method"}
# torch.optim.Adam and RAdam add their decay to the gradient, unless this is True.
_DECOUPLED = "decoupled_weight_decay"
# A setting is off if it is None or False. These are off with these values, too; fused Adams have `bias_correction`.
_OFF = {_DECOUPLED: True, "algo": "muon", "bias_correction": True}


def _same(*keys: str) -> dict[str, str]:
    return {key: key for key in keys}


def _branch_of_flag(flag: Any) -> Optional[str]:
    return {True: "muon", False: "adamw"}.get(flag) if isinstance(flag, Real) else None


def branch_by_flag(group: Group, state: Mapping[str, Any]) -> Optional[str]:
    """Return the branch that the group's `use_muon` chooses, or None if that is neither True nor False."""
    return _branch_of_flag(group.get("use_muon", True))


_STATE = {"muon": _same("momentum_buffer"), "adamw": _same("step", "exp_avg", "exp_avg_sq")}
_NUMBERED_MOMENTS = {**_STATE, "adamw": {"step": "step", "exp_avg": "moment1", "exp_avg_sq": "moment2"}}


class Source(NamedTuple):
    """One optimizer; tables map, for each branch (`muon` or `adamw`), our keys to its keys."""

    settings: dict[str, dict[str, str]]
    state: dict[str, dict[str, str]] = _STATE
    branch_of: Callable[[Group, Mapping[str, Any]], Optional[str]] = branch_by_flag  # from a parameter's group, state
    constants: Mapping[str, Any] = MappingProxyType({})  # settings of matrices that are fixed in its code
    adapt_: Optional[Callable[[Settings, Group, str], None]] = None  # translates settings copied from a group
    adapted: frozenset[str] = frozenset()  # other keys of a group that `adapt_` reads
    needed: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # keys of a group that it must have, by branch
    sums: bool = False  # momentum is momentum * sum + gradient, not an average
    sorts: bool = False  # matrices come largest first
    unused: frozenset[str] = frozenset()  # state of matrices that is not imported


def known_keys(source: Source) -> set[str]:
    """Return the keys of the source's groups that are translated, or that are no settings."""
    return {key for table in source.settings.values() for key in table.values()} | source.adapted | _UNRELATED


def _is_off(key: str, value: Any) -> bool:
    return value is None or (isinstance(value, (Real, str)) and value == _OFF.get(key, False))


def translated(group: Group, branch: str, source: Source) -> tuple[Settings, list[str]]:
    """Return our settings for a group of `source` in `branch`, and those without a counterpart as `key=value`."""
    keys = dict(source.settings[branch])
    if "lr" in keys:
        keys["initial_lr"] = "initial_lr"
    settings = {key: group[source_key] for key, source_key in keys.items() if source_key in group}
    settings.update(source.constants if branch == "muon" else {"fallback": "adamw"})
    if source.adapt_ is not None:
        source.adapt_(settings, group, branch)
    if source.sums and branch == "muon":
        # eps is added to the norm of the sum, which is 1 / (1 - momentum) times that of the average.
        settings["eps"] = (1 - settings["momentum"]) * settings["eps"]
    known = known_keys(source)
    known |= set() if group.get("weight_decay") else {_DECOUPLED}
    lost = {key: value for key, value in group.items() if key not in known and not _is_off(key, value)}
    lost = [f"{'decay of gradients, ' if key == _DECOUPLED else ''}{key}={value!r}" for key, value in lost.items()]
    for key, source_key in keys.items():
        if source_key in group and key not in settings:
            lost.append(f"{source_key}={group[source_key]!r}")
    return settings, lost


def translated_state(state: Mapping[str, Any], group: Group, branch: str, source: Source) -> dict[str, Tensor]:
    """Return the state of one parameter under our keys and in our scale."""
    result = {key: state[source_key] for key, source_key in source.state[branch].items()}
    if branch == "adamw":
        step = result["step"]  # a number in old files
        result["step"] = (step if isinstance(step, Tensor) else torch.tensor(step, device="cpu")).to(torch.float32)
    elif source.sums:
        result["momentum_buffer"] = result["momentum_buffer"] * (1 - group[source.settings["muon"]["momentum"]])
    return result


def _timm_branch(group: Group, state: Mapping[str, Any]) -> Optional[str]:
    # A parameter that has had a gradient has the branch in its state; else shapes decide, unless the group does.
    forced = False if group.get("use_fallback") else group.get("use_muon")
    return _branch_of_flag(state.get("use_muon", forced))


def _moonlight_branch(group: Group, state: Mapping[str, Any]) -> Optional[str]:
    return _branch_of_flag(state.get("use_muon"))


def _adapt_timm_(settings: Settings, group: Group, branch: str) -> None:
    """Translate in place timm's rate of the fallback, its NAdamW by `nesterov`, and its safety factor."""
    if branch == "adamw":
        scale = group.get("fallback_lr_scale")
        if scale is None:  # older versions have a separate learning rate
            base = group.get("initial_lr", group["lr"])
            scale = group["adamw_lr"] / base if group.get("adamw_lr") is not None and base else 1.0
        settings.update({key: settings[key] * scale for key in ("lr", "initial_lr") if key in settings})
        settings["fallback"] = "nadamw" if group["nesterov"] else "adamw"
        return
    s = group.get("safety_factor", 1.0)
    if s != 1:
        # timm multiplies the norm by s before eps bounds it, which is the same as scaling the first step's argument.
        first, *rest = resolve_schedule(settings["ns_coefficients"], settings["ns_steps"])
        settings.update(ns_coefficients=(scaled_argument(first, s), *rest), eps=settings["eps"] / s)
    if not settings.get("adjust_lr_fn", True):  # no multiplier at all
        del settings["adjust_lr_fn"]


def _adapt_dion_(settings: Settings, group: Group, branch: str) -> None:
    """Translate in place dion's betas of AdamW, its cautious decay, its `flatten`, and its names of multipliers."""
    if group.get("cautious_wd"):
        settings["decay_mode"] = "cautious"
    if branch == "adamw":
        settings["adamw_betas"] = (group["beta1"], group["beta2"])
        return
    if group.get("flatten"):
        settings["conv_mode"] = "flatten"
    # Its spectral_norm is the factor sqrt(rows / cols).
    multiplier = {"spectral_norm": "rms_to_rms", "rms_norm": "match_rms_adamw"}.get(str(settings.pop("adjust_lr_fn")))
    if multiplier is not None:
        settings["adjust_lr_fn"] = multiplier


def _dion_branch(group: Group, state: Mapping[str, Any]) -> Optional[str]:
    algorithm = group.get("algorithm", "muon")
    return "muon" if algorithm == "normuon" else str(algorithm)


_SHARED = _same("lr", "weight_decay", "momentum", "nesterov")
_RECIPE = _same("ns_coefficients", "ns_steps", "adjust_lr_fn", "eps")
_ADAMW = {**_same("lr", "weight_decay"), "adamw_betas": "betas", "adamw_eps": "eps"}

_DION_MUON = {**_SHARED, "momentum": "mu", "eps": "epsilon", "adjust_lr_fn": "adjust_lr", "split_rows": "split_sizes"}
_DION_ADAMW = {**_same("lr", "weight_decay"), "adamw_eps": "epsilon"}
_DION_ADAMW_STATE = {"step": "step", "exp_avg": "momentum", "exp_avg_sq": "variance"}
_DION = Source(
    {"muon": _DION_MUON, "adamw": _DION_ADAMW},
    {"muon": {"momentum_buffer": "momentum"}, "adamw": _DION_ADAMW_STATE},
    branch_of=_dion_branch,
    adapt_=_adapt_dion_,
    adapted=frozenset({"beta1", "beta2", "flatten", "cautious_wd"}),
    needed={"muon": ("mu", "epsilon", "adjust_lr"), "adamw": ("beta1", "beta2")},
    sums=True,
)

# The source of files that this package saved in other groups, which need no translation: `regrouping` reads them.
OTHER_GROUPS = "other_groups"

SOURCES = {
    OTHER_GROUPS: Source({"muon": {}, "adamw": {}}),
    # torch/optim/_muon.py and torch/optim/adamw.py, torch 2.13
    "torch": Source(
        {"muon": {**_SHARED, **_RECIPE}, "adamw": {**_ADAMW, "maximize": "maximize"}},
        branch_of=lambda group, state: "muon",
    ),
    # torch/optim/adamw.py and torch/optim/adam.py, torch 2.13
    "adamw": Source(
        # `maximize` flips the sign of the saved averages, so it is imported in both branches.
        {"muon": _same("maximize"), "adamw": {**_ADAMW, "maximize": "maximize"}},
        {**_STATE, "muon": {"momentum_buffer": "exp_avg"}},
        branch_of=lambda group, state: None,
        unused=frozenset({"step", "exp_avg_sq"}),
    ),
    # timm/optim/muon.py, timm 1.0.31
    "timm": Source(
        {"muon": {**_SHARED, **_RECIPE, **_same("conv_mode", "normalize_spatial")}, "adamw": _ADAMW},
        branch_of=_timm_branch,
        adapt_=_adapt_timm_,
        adapted=frozenset({"fallback_lr_scale", "adamw_lr", "safety_factor"}),
        needed={"muon": ("ns_coefficients", "ns_steps", "eps"), "adamw": ("lr", "nesterov")},
    ),
    # https://github.com/KellerJordan/Muon, muon.py of the package muon-optimizer 0.1.0
    "keller_jordan": Source(
        {"muon": _same("lr", "weight_decay", "momentum"), "adamw": {**_ADAMW, "maximize": "maximize"}},
        constants=dict(nesterov=True, ns_coefficients="original", ns_steps=5, eps=1e-7, adjust_lr_fn="original"),
        needed={"muon": ("momentum",), "adamw": ("betas",)},
        sorts=True,
    ),
    # motif-technologies/optimizer on the Hub, muon.py
    "motif": Source(
        {"muon": {**_SHARED, **_same("ns_steps")}, "adamw": _same("lr", "weight_decay", "adamw_betas", "adamw_eps")},
        _NUMBERED_MOMENTS,
        constants=dict(adjust_lr_fn="match_rms_adamw", eps=1e-7),
        needed={"muon": ("momentum", "ns_steps"), "adamw": ("adamw_betas",)},
        sums=True,
    ),
    # https://github.com/MoonshotAI/Moonlight, examples/toy_train.py, c2ad5b2
    "moonlight": Source(
        {
            "muon": {**_same("lr", "momentum", "nesterov", "ns_steps"), "weight_decay": "wd"},
            "adamw": {**_same("lr", "adamw_betas", "adamw_eps"), "weight_decay": "wd"},
        },
        _NUMBERED_MOMENTS,
        branch_of=_moonlight_branch,
        constants=dict(ns_coefficients="original", adjust_lr_fn="match_rms_adamw", eps=1e-7),
        needed={"muon": ("momentum", "ns_steps", "wd"), "adamw": ("adamw_betas", "wd")},
        sums=True,
    ),
    # https://github.com/microsoft/dion, dion/muon.py, 0a059a4
    "dion": _DION,
    # https://github.com/microsoft/dion, dion/normuon.py, 0333cc1
    "dion_normuon": _DION._replace(
        settings={"muon": {**_DION_MUON, "second_moment_beta": "muon_beta2"}, "adamw": _DION_ADAMW},
        state={"muon": {"momentum_buffer": "momentum", "second_moment": "variance_neuron"}, "adamw": _DION_ADAMW_STATE},
        constants=dict(second_moment="rows"),
    ),
}
