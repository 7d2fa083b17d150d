"""Settings that were changed in the groups of an optimizer after its construction: a step checks them first."""

from __future__ import annotations

import math
from operator import is_, itemgetter
from typing import Any, Sequence

from .group_keys import warn_of_misspelt_keys
from .setting_values import flag, plain_rounding_step
from .settings import DISSOLVED, SCHEDULED, SETTINGS, Group, live_number, plain_settings

# Schedulers set the others at every step.
_COMPARED = itemgetter("use_muon", *(key for key in SETTINGS if key not in SCHEDULED))


def compared_settings(groups: Sequence[Group]) -> list[Any]:
    """Return, of all groups, the settings that are checked again after a change, and how many keys each group has."""
    return [value for group in groups for value in (*_COMPARED(group), len(group))]


def are_same(settings: Sequence[Any], checked: Sequence[Any]) -> bool:
    """Return whether `settings` are the objects that were `checked`, which plain ones in groups never change.

    It is not enough that they are equal: a NumPy number equals a plain one, and `torch.load(weights_only=True)` refuses
    files with it.
    """
    return len(settings) == len(checked) and all(map(is_, settings, checked))


def make_live_numbers_plain_(groups: Sequence[Group]) -> None:
    """Make each `lr` and `weight_decay` a plain float in place, unless it is a tensor: schedulers may set NumPy's.

    And each `rounding_step`, which users set after ranks disagreed, an int. A file with NumPy's numbers cannot be
    loaded by `torch.load(weights_only=True)`. Raises the errors of `live_number` and of `plain_rounding_step`.
    """
    for group in groups:
        for key in SCHEDULED:
            value = group[key]
            if type(value) is not float or not 0 <= value < math.inf:
                group[key] = live_number(key, value)
        count = group["rounding_step"]
        if type(count) is not int or count < 0:
            group["rounding_step"] = plain_rounding_step("rounding_step", count)


def make_plain_(groups: Sequence[dict[str, Any]]) -> None:
    """Make the settings of groups plain in place, since users may have changed them.

    Raises the errors of `plain_settings`, and ValueError for what no step reads: `betas` and `DISSOLVED`. Then no group
    has changed. Warns of new keys that are misspelt (`warn_of_misspelt_keys`).
    """
    for group in groups:
        flag("use_muon", group["use_muon"])
        if "betas" in group:
            raise ValueError(
                f"betas={group['betas']} in a group of an optimizer that is already made would do nothing: write its "
                "adamw_betas"
            )
    plain = [plain_settings(group, is_made=True) for group in groups]
    for settings in plain:
        for key, instead in DISSOLVED.items():
            if settings[key] is not None:
                raise ValueError(
                    f"{key}={settings[key]} in a group of an optimizer that is already made would do nothing: {instead}"
                )
    for group in groups:
        warn_of_misspelt_keys(group)  # raises if the user turns warnings into errors
    for group, settings in zip(groups, plain):
        group.update(settings)
