"""Learning rates and decay of groups, and the ratio of AdamW's rate to Muon's.

Both halves of a user's group have its `lr`; AdamW's half has the ratio of its rate to `lr` as `lr_factor`. So the ratio
survives schedulers that set one `lr` for all groups: OneCycleLR, CyclicLR, SWALR, and the usual loop over groups.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence

from torch import Tensor

from ..kernels.user_warnings import warn_user
from ..rules.decay import Number, scaled_decay
from .names import listed, names_of
from .setting_values import number_at_hand
from .settings import SCHEDULED, Group, keeps_norm

# Independent decay is warned of from this share on that a step removes. Usual is lr * weight_decay, such as 0.02 * 0.1.
LARGE_SHARE = 0.01


def rate_of(group: Group) -> Number:
    """Return the rate of a group's parameters without a matrix's multiplier: `lr * lr_factor`, `lr` itself for 1."""
    lr, factor = group["lr"], group["lr_factor"]
    return lr if factor == 1 else lr * factor


def decay_of(group: Group) -> Number:
    """Return the weight decay of a step at the rate `rate_of` (`rules.decay.scaled_decay`).

    `decay_lr` has the units of `lr`, so `lr_factor` cancels out.
    """
    lr = group["lr"] if group["lr_factor"] else 0.0
    return scaled_decay(group["decay_mode"], lr, group["weight_decay"], group["decay_lr"])


def live_tensors(group: Group) -> list[Tensor]:
    """Return the numbers of a group that are tensors, which its steps read."""
    return [group[key] for key in SCHEDULED if isinstance(group[key], Tensor)]


def check_live_tensors(group: Group) -> None:
    """Raise ValueError if a number of a group is on a device where a step of its parameters cannot read it."""
    devices = {p.device for p in group["params"] if not p.is_meta}
    for key in SCHEDULED:
        value = group[key]
        if isinstance(value, Tensor) and value.device.type != "cpu" and not devices <= {value.device}:
            raise ValueError(
                f"{key} is a tensor on {value.device}, and parameters of its group are on "
                f"{', '.join(sorted(map(str, devices)))}: put it on the CPU, or where all parameters of the group are"
            )


def fallback_rate(changed: Group, settings: Group, default_adamw_lr: Optional[Number]) -> tuple[Number, float]:
    """Return `lr` and `lr_factor` of an AdamW group with these `settings`, some of which the user has `changed`.

    The group's `lr_factor` counts if it is given, else the rate that `_of_fallback` returns. If that has no ratio to
    `lr`, because it is a tensor or `lr` is 0, it becomes the `lr`, with factor 1. Warns of that if both are numbers:
    a schedule will change the 0.
    """
    lr, factor, rate = settings["lr"], settings["lr_factor"], _of_fallback("lr", changed, settings, default_adamw_lr)
    if rate is None or "lr_factor" in changed:
        return lr, factor
    ratio = ratio_of(rate, lr)
    if ratio is None and not isinstance(rate, Tensor) and not isinstance(lr, Tensor) and rate:
        warn_user(
            f"adamw_lr={rate} has no ratio to lr={lr} that could be kept, so AdamW's groups get it as their lr: a "
            "schedule that sets one lr for all groups will set AdamW's to that of the matrices. Write the largest lr "
            "of the schedule instead of this lr"
        )
    return (rate, 1.0) if ratio is None else (lr, ratio)


def ratio_of(rate: Number, lr: Number) -> Optional[float]:
    """Return `rate / lr`, or None if there is no such number: `rate` is a tensor, or `lr` is 0 or nearly so."""
    now = float(lr)
    if isinstance(rate, Tensor) or not now or math.isinf(rate / now):
        return None
    return rate / now


def fallback_decay(changed: Group, settings: Group, default_adamw_weight_decay: Optional[Number]) -> Number:
    """Return the `weight_decay` of an AdamW group with these `settings`, some of which the user has `changed`."""
    decay = _of_fallback("weight_decay", changed, settings, default_adamw_weight_decay)
    return settings["weight_decay"] if decay is None else decay


def fast_decay(groups: Sequence[Group]) -> list[str]:
    """Return a line for each weight decay with which independent decay takes much of a parameter in every step.

    Tensors that are not on the CPU are left out, because reading one waits for its device.
    """
    names: dict[float, list[str]] = {}
    for group in groups:
        share = number_at_hand(group["weight_decay"])
        if group["decay_mode"] == "independent" and not keeps_norm(group) and not isinstance(share, Tensor):
            names.setdefault(share, []).extend(names_of(group))
    return [
        f"weight_decay={share:g} with decay_mode='independent' removes {100 * share:.3g} % of {listed(of_share)} in "
        "every step, whatever lr is. Usual is lr * weight_decay of the other modes, such as 0.002 for lr=0.02 and 0.1"
        for share, of_share in names.items()
        if share >= LARGE_SHARE
    ]


def _of_fallback(key: str, changed: Group, settings: Group, default: Optional[Number]) -> Optional[Number]:
    """Return the fallback's own number for a key, None where it has that of matrices.

    The first of these that is given counts: the group's `adamw_<key>`, its `<key>`, the default `adamw_<key>`.
    """
    if changed.get(f"adamw_{key}") is not None:
        return settings[f"adamw_{key}"]
    return default if changed.get(key) is None else None


def first_decay_lr(settings: Group, lr: float | Tensor) -> Optional[float]:
    """Return the `decay_lr` of a group: the given one, else `lr`, with which it starts, if its decay mode uses one.

    Raises ValueError if it is needed and neither given nor known from `lr`.
    """
    if settings["decay_mode"] != "corrected":
        return settings["decay_lr"]
    if settings["decay_lr"] is None and not float(lr) > 0:
        raise ValueError(
            f"decay_mode='corrected' scales by lr / decay_lr, and lr is {float(lr)}: give each group a decay_lr, the "
            "largest lr of its schedule"
        )
    return float(lr) if settings["decay_lr"] is None else settings["decay_lr"]
