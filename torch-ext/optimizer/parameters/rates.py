"""Learning rates and decay of groups, and the ratio of AdamW's rate to Muon's.

Both halves of a user's group have its `lr`; AdamW's half has the ratio of its rate to `lr` as `lr_factor`. So the ratio
survives schedulers that set one `lr` for all groups: OneCycleLR, CyclicLR, SWALR, and the usual loop over groups.
"""

from __future__ import annotations

import math
from typing import Optional

from torch import Tensor

from ..rules.decay import Number, scaled_decay
from .settings import SCHEDULED, Group


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
    `lr`, because it is a tensor or `lr` is 0, it becomes the `lr`, with factor 1.
    """
    lr, factor, rate = settings["lr"], settings["lr_factor"], _of_fallback("lr", changed, settings, default_adamw_lr)
    if rate is None or "lr_factor" in changed:
        return lr, factor
    ratio = ratio_of(rate, lr)
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
