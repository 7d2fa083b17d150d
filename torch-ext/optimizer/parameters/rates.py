"""The rates of groups: how far a step goes and how much it decays, and how AdamW's rate stands beside Muon's.

Both halves of a given group have its `lr`, and AdamW's has the ratio of its rate to that as `lr_factor`. So the ratio
survives what sets one `lr` for all groups: OneCycleLR, CyclicLR, SWALR, and the usual loop over groups.
"""

from __future__ import annotations

import math
from typing import Optional

from torch import Tensor

from ..rules.decay import Number, scaled_decay
from .settings import Group

# What a step reads anew, also from tensors.
_LIVE = ("lr", "weight_decay")


def rate_of(group: Group) -> Number:
    """Return how far a step of a group goes, without a matrix's multiplier: `lr * lr_factor`, and `lr` itself for 1."""
    lr, factor = group["lr"], group["lr_factor"]
    return lr if factor == 1 else lr * factor


def decay_of(group: Group) -> Number:
    """Return the weight decay of a step that goes as far as `rate_of` says (`rules.decay.scaled_decay`).

    `decay_lr` is in the units of `lr`, so that the factor of both cancels out.
    """
    lr = group["lr"] if group["lr_factor"] else 0.0
    return scaled_decay(group["decay_mode"], lr, group["weight_decay"], group["decay_lr"])


def live_tensors(group: Group) -> list[Tensor]:
    """Return those numbers of a group that its steps read from tensors."""
    return [group[key] for key in _LIVE if isinstance(group[key], Tensor)]


def check_live_tensors(group: Group) -> None:
    """Raise ValueError if a number of a group lies where a step of its parameters cannot read it."""
    devices = {p.device for p in group["params"] if not p.is_meta}
    for key in _LIVE:
        value = group[key]
        if isinstance(value, Tensor) and value.device.type != "cpu" and not devices <= {value.device}:
            raise ValueError(
                f"{key} is a tensor on {value.device}, and parameters of its group are on "
                f"{', '.join(sorted(map(str, devices)))}: put it on the CPU, or where all parameters of the group are"
            )


def rates_beside(changed: Group, settings: Group, default_adamw_lr: Optional[Number]) -> tuple[Number, float]:
    """Return `lr` and `lr_factor` of a group of AdamW's that has `changed` some of its `settings`.

    The first of these counts that there is: the group's `lr_factor`, its `adamw_lr`, its `lr`, the default `adamw_lr`.
    An `adamw_lr` that is no multiple of `lr`, since it is a tensor or `lr` is 0, becomes the `lr`, with the factor 1.
    """
    lr, factor, rate = settings["lr"], settings["lr_factor"], None
    if changed.get("adamw_lr") is not None:
        rate = settings["adamw_lr"]
    elif changed.get("lr") is None:
        rate = default_adamw_lr
    if rate is None or "lr_factor" in changed:
        return lr, factor
    now = float(lr)
    if isinstance(rate, Tensor) or not now or math.isinf(rate / now):
        return rate, 1.0
    return lr, rate / now


def first_decay_lr(settings: Group, lr: float | Tensor) -> Optional[float]:
    """Return the `decay_lr` of a group that begins with `lr`; None where its decay takes none.

    Raises ValueError where it cannot be told.
    """
    if settings["decay_mode"] != "corrected":
        return settings["decay_lr"]
    if settings["decay_lr"] is None and not float(lr) > 0:
        raise ValueError(
            f"decay_mode='corrected' scales by lr / decay_lr, and lr is {float(lr)}: give each group a decay_lr, the "
            "largest lr of its schedule"
        )
    return float(lr) if settings["decay_lr"] is None else settings["decay_lr"]
