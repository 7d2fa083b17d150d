"""`repr` of the optimizer: parameters of each branch, settings that differ from the defaults, a line per group."""

from __future__ import annotations

from collections import Counter
from typing import Any, Mapping, Sequence

from ..parameters.settings import SETTINGS, Group
from ..rules.fallback_table import FALLBACKS
from .writing import number_set, shown_number

# Settings that are not listed, because each group's line shows them, as they are or in another form.
_NOT_LISTED = ("lr", "weight_decay", "adamw_lr", "adamw_weight_decay", "fallback")
# The most lines of groups, so that the text fits a screen.
_MOST_LINES = 16


def brief(name: str, groups: Sequence[Group], settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a description of an optimizer of the class `name` in a few lines.

    Of its `settings`, those equal to `defaults` are left out. Groups with the same text share a line.
    """
    counts: Counter[str] = Counter()
    for group in groups:
        counts[_branch(group)] += len(group["params"])
    branches = ", ".join(f"{count} {_parameters(count)} by {branch}" for branch, count in counts.items())
    asked = [key for key in settings if key in defaults and key not in _NOT_LISTED]
    others = {key: settings[key] for key in asked if settings[key] != defaults[key]}
    lines = [f"{name}: {branches or 'no parameters'}"]
    lines += [f"  settings: {_written(others)}"] if others else []
    by_text: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        by_text.setdefault(_group(group, settings), []).append(number)
    described = [f"  {_which(numbers)}: {text}" for text, numbers in by_text.items()]
    if len(described) > _MOST_LINES:
        described[_MOST_LINES - 1 :] = [f"  and {len(described) - _MOST_LINES + 1} more lines: see param_groups"]
    return "\n".join([*lines, *described])


def _which(numbers: Sequence[int]) -> str:
    names = f"group {number_set(numbers)}"
    return names if len(names) < 30 else f"{len(numbers)} groups from group {numbers[0]} on, each"


def _group(group: Group, settings: Mapping[str, Any]) -> str:
    count = len(group["params"])
    others = {key: group[key] for key in SETTINGS if key not in _NOT_LISTED and group[key] != settings.get(key)}
    role = {"role": group["role"]} if "role" in group else {}
    shown = {**{key: shown_number(group[key]) for key in ("lr", "weight_decay")}, **role, **others}
    return f"{count} {_parameters(count)} by {_branch(group)}, {_written(shown)}"


def _branch(group: Group) -> str:
    return "Muon" if group["use_muon"] else FALLBACKS[group["fallback"]].name


def _parameters(count: int) -> str:
    return "parameter" if count == 1 else "parameters"


def _written(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return getattr(value, "__name__", str(value))
