"""The settings of a parameter group in one table: how each one is checked, and what a change of it affects.

To add a setting, add an argument of this name to `Muon` and an entry here. The entry decides how it is checked, whether
a change remakes the plan, which matrices may share a batch, and whether ranks compare it. A step reads settings in
`step/recipe.py`, or for the fallback in `step/fallback.py`.
"""

from __future__ import annotations

from enum import Enum
from numbers import Real
from typing import Any, Callable, Mapping, NamedTuple

from torch import Tensor

from ..iteration import METHODS
from ..learning_rate import check_update_rms, step_multiplier
from ..rules.decay import DECAY_MODES, scaled_decay
from ..rules.equalization import EQUALIZATIONS, RENORMALIZATIONS
from ..rules.fallback_table import FALLBACKS
from ..rules.second_moment import SECOND_MOMENTS
from ..schedules import resolve_schedule
from .matrices import CONV_MODES
from .setting_values import (
    flag,
    number_at_hand,
    one_of,
    optional,
    plain_adjustment,
    plain_below_one,
    plain_betas,
    plain_coefficients,
    plain_count,
    plain_momentum_dtype,
    plain_names,
    plain_number,
    plain_number_or_tensor,
    plain_positive,
    plain_rounding_step,
    plain_split_rows,
    plain_work_dtype,
)

MASTER_WEIGHTS = (None, "split")

Group = Mapping[str, Any]

# Numbers that schedulers set, in tensors too; every step reads and checks them again.
SCHEDULED = ("lr", "weight_decay")
# How far below zero a schedule may set these: more than the rounding error of one that subtracts.
_ROUNDING = 1e-9


class Role(Enum):
    """What a setting affects; ranks compare those in `PLANNED` and in `COMPARED_AT_EVERY_STEP`."""

    PLAN = "which matrices there are, and how state is made: a change remakes the plan"
    METHOD = "how matrices are updated: a change remakes the plan, and the matrices of a batch share the value"
    RECIPE = "read at every step, and the matrices of a batch share the value"
    LIVE = "read at every step, and the matrices of a batch may have different values"
    HOST = "used by this process only, or read only when groups are made"


class Setting(NamedTuple):
    """One key of a parameter group: `check(key, value)` returns the value in plain form, or raises."""

    check: Callable[[str, Any], Any]
    role: Role


def live_number(key: str, value: Any) -> Any:
    """Return a number of an optimizer that is already made: a plain float, or a tensor as it is.

    Raises as the constructor does, but takes numbers a rounding error below zero, where schedulers may end.
    """
    number = number_at_hand(value)
    if isinstance(number, Real) and -_ROUNDING < number < 0:
        return value if isinstance(value, Tensor) else float(value)
    return SETTINGS[key].check(key, value)


def plain_settings(settings: Group, is_made: bool = False) -> dict[str, Any]:
    """Return `settings` with plain values that `torch.load(weights_only=True)` can read; other keys stay as they are.

    `is_made` says that they are of an optimizer that is already made, perhaps of a saved one (`live_number`): its
    groups have a `decay_lr` for `corrected` decay. Raises ValueError or TypeError for settings that cannot work.
    """
    live = dict.fromkeys(SCHEDULED, live_number) if is_made else {}
    plain = {key: live.get(key, SETTINGS[key].check)(key, x) if key in SETTINGS else x for key, x in settings.items()}
    plain["rounding_step"] = plain_rounding_step("rounding_step", plain["rounding_step"])
    if plain["stochastic_rounding"] and plain["capturable"]:
        raise ValueError("stochastic_rounding draws new seeds at every step, but a captured step would repeat them")
    if plain["stochastic_rounding"] and plain["master_weights"]:
        raise ValueError("stochastic_rounding has nothing to round with master_weights, which keep what rounding loses")
    if plain["offload"] and plain["capturable"]:
        raise ValueError("offload copies momentum to the device at every step, which a captured step cannot do")
    if is_made:
        scaled_decay(plain["decay_mode"], 0.0, 0.0, plain["decay_lr"])  # raises without a `decay_lr`
    check_update_rms(plain["update_rms"], plain["adjust_lr_fn"])
    if plain.get("use_muon") and plain["lr_factor"] != 1:
        raise ValueError(f"lr_factor={plain['lr_factor']} is for groups that AdamW updates: in Muon's groups write lr")
    resolve_schedule(plain["ns_coefficients"], plain["ns_steps"])
    return plain


def keeps_norm(group: Group) -> bool:
    """Whether a step keeps the norms of the matrices of a group, which then do not decay (`rules/hyperball.py`)."""
    return group["use_muon"] and group["experimental_hyperball"]


def multiplier_in_group(group: Group, rows: int, cols: int, scale: float) -> float:
    """Return the factor of `lr` for a rows x cols matrix with the settings of its group and the `scale` of its view.

    With `experimental_hyperball` a step is proportional to the matrix, whatever its shape and its view.
    """
    if group["experimental_hyperball"]:
        return 1.0
    return step_multiplier(group["adjust_lr_fn"], rows, cols, group["update_rms"]) * scale


SETTINGS: dict[str, Setting] = {
    "lr": Setting(plain_number_or_tensor, Role.LIVE),
    "weight_decay": Setting(plain_number_or_tensor, Role.LIVE),
    "momentum": Setting(plain_below_one, Role.RECIPE),
    "nesterov": Setting(flag, Role.RECIPE),
    "ns_coefficients": Setting(plain_coefficients, Role.METHOD),
    "eps": Setting(plain_number, Role.RECIPE),
    "ns_steps": Setting(plain_count, Role.METHOD),
    "adjust_lr_fn": Setting(plain_adjustment, Role.METHOD),
    "update_rms": Setting(plain_positive, Role.METHOD),
    "ns_dtype": Setting(plain_work_dtype, Role.METHOD),
    "ns_method": Setting(one_of(METHODS), Role.METHOD),
    "equalize": Setting(one_of(EQUALIZATIONS), Role.METHOD),
    "renormalize": Setting(one_of(RENORMALIZATIONS), Role.METHOD),
    "second_moment": Setting(one_of(SECOND_MOMENTS), Role.METHOD),
    "second_moment_beta": Setting(plain_below_one, Role.RECIPE),
    "experimental_hyperball": Setting(flag, Role.METHOD),
    "decay_mode": Setting(one_of(DECAY_MODES), Role.RECIPE),
    "decay_lr": Setting(optional(plain_positive), Role.LIVE),
    "maximize": Setting(flag, Role.RECIPE),
    "conv_mode": Setting(one_of(CONV_MODES), Role.PLAN),
    "normalize_spatial": Setting(flag, Role.PLAN),
    "expert_keys": Setting(plain_names, Role.PLAN),
    "stacked": Setting(optional(flag), Role.PLAN),
    "transposed": Setting(flag, Role.PLAN),
    "split_rows": Setting(optional(plain_split_rows), Role.PLAN),
    "fallback": Setting(one_of(tuple(FALLBACKS)), Role.LIVE),
    "adamw_lr": Setting(optional(plain_number_or_tensor), Role.HOST),
    "adamw_weight_decay": Setting(optional(plain_number_or_tensor), Role.HOST),
    "lr_factor": Setting(plain_number, Role.LIVE),
    "adamw_betas": Setting(plain_betas, Role.LIVE),
    "adamw_eps": Setting(plain_number, Role.LIVE),
    "stochastic_rounding": Setting(flag, Role.RECIPE),
    "master_weights": Setting(one_of(MASTER_WEIGHTS), Role.METHOD),
    "momentum_dtype": Setting(plain_momentum_dtype, Role.PLAN),
    "offload": Setting(flag, Role.METHOD),
    "capturable": Setting(flag, Role.HOST),
}
# Arguments that become other keys of the fallback's groups, and what to write there once the optimizer is made.
DISSOLVED = {
    "adamw_lr": "AdamW's groups move by lr * lr_factor, so write their lr or lr_factor",
    "adamw_weight_decay": "write weight_decay in AdamW's groups",
}
# Settings that only a group can have, with their defaults.
OF_GROUPS = {"transposed": False, "split_rows": None, "decay_lr": None, "lr_factor": 1.0}
# Group keys that are not arguments of `Muon`: the branch that routing chose, and the number of steps with seeds drawn.
_DERIVED = {"use_muon": Role.PLAN, "rounding_step": Role.LIVE}


def keys_of(*roles: Role) -> tuple[str, ...]:
    """Return the group keys whose role is one of `roles`."""
    roles_by_key = {**{key: setting.role for key, setting in SETTINGS.items()}, **_DERIVED}
    return tuple(key for key, role in roles_by_key.items() if role in roles)


# Matrices of groups that agree in these may share a batch.
STACKED = keys_of(Role.METHOD, Role.RECIPE)
# What a plan depends on: a change remakes it, and ranks compare these once for each plan.
PLANNED = keys_of(Role.PLAN, Role.METHOD)
COMPARED_AT_EVERY_STEP = keys_of(Role.RECIPE, Role.LIVE)
