"""The settings of a parameter group in one table: how each one is checked, and what a change of it affects.

To add a setting, add an argument of this name to `Muon` and an entry here. The entry decides how it is checked, whether
a change remakes the plan, which matrices may share a batch, and whether ranks compare it. A step reads settings in
`step/recipe.py`, or for the fallback in `step/fallback.py`.
"""

from __future__ import annotations

import math
from enum import Enum
from numbers import Integral, Real
from typing import Any, Callable, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ..iteration import DTYPES, METHODS, check_work_dtype
from ..kernels.formats import dtype_name
from ..learning_rate import UPDATE_RMS, check_adjustment, step_multiplier
from ..rules.decay import DECAY_MODES
from ..rules.equalization import EQUALIZATIONS, RENORMALIZATIONS
from ..rules.second_moment import SECOND_MOMENTS
from ..schedules import resolve_schedule
from .matrices import CONV_MODES, plain_split_rows
from .sequences import is_sequence

FALLBACKS = ("adamw", "nadamw")
MASTER_WEIGHTS = (None, "split")
MOMENTUM_DTYPES = (None, "float32", "float64", "bfloat16", "float16", "int8")

Group = Mapping[str, Any]


# Numbers that schedulers set, in tensors too; every step reads and checks them again.
SCHEDULED = ("lr", "weight_decay")
# How far below zero a schedule may set these: more than the rounding error of one that subtracts.
_ROUNDING = 1e-9


class Role(Enum):
    """What a setting affects; `COMPARED_ONCE` and `COMPARED_AT_EVERY_STEP` list the ones that ranks compare."""

    MATRICES = "which matrices there are: a change remakes the plan"
    METHOD = "how matrices are updated: a change remakes the plan, and the matrices of a batch share the value"
    STATE = "how state is made: a change remakes the plan"
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
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if is_number and -_ROUNDING < value < 0 else SETTINGS[key].check(key, value)


def plain_settings(settings: Group, is_made: bool = False) -> dict[str, Any]:
    """Return `settings` with plain values that `torch.load(weights_only=True)` can read; other keys stay as they are.

    `is_made` says that they are of an optimizer that is already made, perhaps of a saved one (`live_number`). Raises
    ValueError or TypeError for settings that cannot work.
    """
    live = dict.fromkeys(SCHEDULED, live_number) if is_made else {}
    plain = {key: live.get(key, SETTINGS[key].check)(key, x) if key in SETTINGS else x for key, x in settings.items()}
    if plain["stochastic_rounding"] and plain["capturable"]:
        raise ValueError("stochastic_rounding draws new seeds at every step, but a captured step would repeat them")
    if plain["stochastic_rounding"] and plain["master_weights"]:
        raise ValueError("stochastic_rounding has nothing to round with master_weights, which keep what rounding loses")
    if plain["offload"] and plain["capturable"]:
        raise ValueError("offload copies momentum to the device at every step, which a captured step cannot do")
    if plain["update_rms"] != UPDATE_RMS and plain["adjust_lr_fn"] != "match_rms_adamw":
        raise ValueError(
            f"update_rms={plain['update_rms']} needs adjust_lr_fn='match_rms_adamw', but adjust_lr_fn is "
            f"{plain['adjust_lr_fn']!r}: write update_rms={UPDATE_RMS}, the default, in groups with another one"
        )
    if plain.get("use_muon") and plain["lr_factor"] != 1:
        raise ValueError(f"lr_factor={plain['lr_factor']} is for groups that AdamW updates: in Muon's groups write lr")
    resolve_schedule(plain["ns_coefficients"], plain["ns_steps"])
    return plain


def multiplier_in_group(group: Group, rows: int, cols: int, scale: float) -> float:
    """Return the factor of `lr` for a rows x cols matrix with the settings of its group and the `scale` of its view.

    With `experimental_hyperball` a step is proportional to the matrix, whatever its shape and its view.
    """
    if group["experimental_hyperball"]:
        return 1.0
    return step_multiplier(group["adjust_lr_fn"], rows, cols, group["update_rms"]) * scale


def _number_or_tensor(key: str, value: Any) -> float | Tensor:
    """Return a number as a float, and a one-element float32 or float64 tensor unchanged; `rates` checks its device."""
    if not isinstance(value, Tensor):
        return _number(key, value)
    if value.numel() != 1 or value.dtype not in (torch.float32, torch.float64) or value.is_meta:
        got = f"{tuple(value.shape)} {value.dtype} on {value.device}"
        raise ValueError(
            f"{key} must be a number or a float32 or float64 tensor of one element that has a value, got {got}"
        )
    return value


def _number(key: str, value: Any, high: float = math.inf) -> float:
    """Return a number in [0, high) as a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        text = ": write it without quotes; YAML reads 1e-3 as text, and 1.0e-3 as a number"
        raise TypeError(f"{key} must be a number, got {value!r}{text if isinstance(value, str) else ''}")
    if not 0 <= value < high:
        raise ValueError(f"{key} must be at least 0 and below {high}, got {value}")
    return float(value)


def _positive(key: str, value: Any) -> float:
    if _number(key, value) == 0:
        raise ValueError(f"{key} must be above 0, got {value}")
    return float(value)


def _below_one(key: str, value: Any) -> float:
    return _number(key, value, 1.0)


def _betas(key: str, value: Any) -> tuple[float, ...]:
    if not is_sequence(value) or len(value) != 2:
        raise ValueError(f"{key} must be two numbers, got {value!r}")
    return tuple(_below_one(key, beta) for beta in value)


def flag(key: str, value: Any) -> bool:
    """Return `value`; TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be True or False, got {value!r}")
    return value


def _one_of(choices: tuple[Optional[str], ...]) -> Callable[[str, Any], Any]:
    def plain(key: str, value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"{key} must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value

    return plain


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not is_sequence(value) or not all(isinstance(name, str) and name for name in value):
        raise TypeError(f"{key} must be names, got {value!r}")
    return tuple(value)


def _coefficients(key: str, value: Any) -> Any:
    """Return a preset's name as it is, and nested sequences as tuples of floats; `resolve_schedule` checks both."""
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return tuple(_coefficients(key, item) for item in value)
    return float(value) if isinstance(value, Real) else value


def _count(key: str, value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _adjustment(key: str, value: Any) -> Any:
    check_adjustment(value)
    return value


def _dtype(key: str, dtype: torch.dtype | str) -> torch.dtype:
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        names = ", ".join([*map(dtype_name, DTYPES), *["int8"] * (key == "momentum_dtype")])
        raise ValueError(f"{key} must be a torch.dtype or its name, such as {names}, got {dtype!r}")
    return resolved


def _work_dtype(key: str, dtype: torch.dtype | str | None) -> Optional[str]:
    """Return the name of a dtype, given as such or by name, None for None; ValueError if it is not a work dtype."""
    return None if dtype is None else dtype_name(check_work_dtype(_dtype(key, dtype)))


def _momentum_dtype(key: str, dtype: torch.dtype | str | None) -> Optional[str]:
    """Return the name of a dtype, None for None; ValueError for one that momentum cannot have."""
    name = None if dtype is None else dtype_name(_dtype(key, dtype))
    if name not in MOMENTUM_DTYPES:
        raise ValueError(f"{key} must be one of {', '.join(map(str, MOMENTUM_DTYPES))}, got {dtype!r}")
    return name


SETTINGS: dict[str, Setting] = {
    "lr": Setting(_number_or_tensor, Role.LIVE),
    "weight_decay": Setting(_number_or_tensor, Role.LIVE),
    "momentum": Setting(_below_one, Role.RECIPE),
    "nesterov": Setting(flag, Role.RECIPE),
    "ns_coefficients": Setting(_coefficients, Role.METHOD),
    "eps": Setting(_number, Role.RECIPE),
    "ns_steps": Setting(_count, Role.METHOD),
    "adjust_lr_fn": Setting(_adjustment, Role.METHOD),
    "update_rms": Setting(_positive, Role.METHOD),
    "ns_dtype": Setting(_work_dtype, Role.METHOD),
    "ns_method": Setting(_one_of(METHODS), Role.METHOD),
    "equalize": Setting(_one_of(EQUALIZATIONS), Role.METHOD),
    "renormalize": Setting(_one_of(RENORMALIZATIONS), Role.METHOD),
    "second_moment": Setting(_one_of(SECOND_MOMENTS), Role.METHOD),
    "second_moment_beta": Setting(_below_one, Role.RECIPE),
    "experimental_hyperball": Setting(flag, Role.METHOD),
    "decay_mode": Setting(_one_of(DECAY_MODES), Role.RECIPE),
    "decay_lr": Setting(lambda key, value: None if value is None else _positive(key, value), Role.LIVE),
    "maximize": Setting(flag, Role.RECIPE),
    "conv_mode": Setting(_one_of(CONV_MODES), Role.MATRICES),
    "normalize_spatial": Setting(flag, Role.MATRICES),
    "expert_keys": Setting(_names, Role.MATRICES),
    "stacked": Setting(lambda key, value: None if value is None else flag(key, value), Role.MATRICES),
    "transposed": Setting(flag, Role.MATRICES),
    "split_rows": Setting(lambda key, value: plain_split_rows(value), Role.MATRICES),
    "fallback": Setting(_one_of(FALLBACKS), Role.LIVE),
    # Becomes the `lr_factor` of the fallback's groups, and None in all groups.
    "adamw_lr": Setting(lambda key, value: None if value is None else _number_or_tensor(key, value), Role.HOST),
    "lr_factor": Setting(_number, Role.LIVE),
    "adamw_betas": Setting(_betas, Role.LIVE),
    "adamw_eps": Setting(_number, Role.LIVE),
    "stochastic_rounding": Setting(flag, Role.RECIPE),
    "master_weights": Setting(_one_of(MASTER_WEIGHTS), Role.METHOD),
    "momentum_dtype": Setting(_momentum_dtype, Role.STATE),
    "offload": Setting(flag, Role.METHOD),
    "capturable": Setting(flag, Role.HOST),
}
# Settings that only a group can have, with their defaults.
OF_GROUPS = {"transposed": False, "split_rows": None, "decay_lr": None, "lr_factor": 1.0}
# Group keys that are not arguments of `Muon`: the branch that routing chose, and the number of steps with seeds drawn.
_DERIVED = {"use_muon": Role.MATRICES, "rounding_step": Role.LIVE}


def keys_of(*roles: Role) -> tuple[str, ...]:
    """Return the group keys whose role is one of `roles`."""
    roles_by_key = {**{key: setting.role for key, setting in SETTINGS.items()}, **_DERIVED}
    return tuple(key for key, role in roles_by_key.items() if role in roles)


# Matrices of groups that agree in these may share a batch.
STACKED = keys_of(Role.METHOD, Role.RECIPE)
PLANNED = COMPARED_ONCE = keys_of(Role.MATRICES, Role.METHOD, Role.STATE)
COMPARED_AT_EVERY_STEP = keys_of(Role.RECIPE, Role.LIVE)
