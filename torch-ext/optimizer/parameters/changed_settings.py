"""Settings that somebody changes in the groups of an optimizer that is already made: a step checks them first."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, Sequence

from ..rules.decay import scaled_decay
from .rates import LIVE
from .settings import SETTINGS, Group, plain_settings

# Schedulers set the others at every step.
_COMPARED = itemgetter(*(key for key in SETTINGS if key not in LIVE))


def compared_settings(groups: Sequence[Group]) -> list[Any]:
    """Return the settings of groups that are checked again when they have changed, as one flat list."""
    return [value for group in groups for value in _COMPARED(group)]


def check_live_numbers(groups: Sequence[Group]) -> None:
    """Raise TypeError or ValueError for an `lr` or `weight_decay` that is no finite number and no tensor of one.

    A negative number is taken, though not by the constructor: schedulers end a rounding error below zero.
    """
    for group in groups:
        for key in LIVE:
            value = group[key]
            if type(value) is not float or not math.isfinite(value):
                SETTINGS[key].check(key, abs(value) if type(value) in (int, float) else value)


def make_plain_(groups: Sequence[dict[str, Any]]) -> None:
    """Make the settings of groups plain in place, since users may have changed them.

    Raises as `plain_settings`, and ValueError for `corrected` decay without `decay_lr` and for `adamw_lr`, which no
    step reads; then no group has changed.
    """
    plain = [plain_settings(group) for group in groups]
    for settings in plain:
        if settings["adamw_lr"] is not None:
            raise ValueError(
                f"adamw_lr={settings['adamw_lr']} in a group of an optimizer that is already made would do nothing: "
                "AdamW's groups move by lr * lr_factor, so write their lr or lr_factor"
            )
        scaled_decay(settings["decay_mode"], 0.0, 0.0, settings["decay_lr"])  # raises without a `decay_lr`
    for group, settings in zip(groups, plain):
        group.update(settings)
