"""The settings that a group gets from another optimizer's groups, and sentences about those that it does not get."""

from __future__ import annotations

from typing import Any, Collection, Sequence

from ..parameters.groups import LENGTHS, other_meanings
from .state_rates import imported_rates
from .state_sources import Settings, Source, branch_by_flag, translated


def merged_groups(
    groups: Sequence[Settings], pairs: Sequence[tuple[Any, Any]], source: Source, cut_off: Collection[int]
) -> tuple[list[Settings], list[str]]:
    """Return `groups` with the settings that they get from the source, and notes on the others.

    `pairs` are a parameter of a group and its entry in the source; both have a `group`. `cut_off` are the numbers of
    the groups that routing has cut from the matrices before them.
    """
    changes, notes = [], []
    for i, group in enumerate(groups):
        # Groups of the source are compared by identity, since they hold tensors.
        by_id = {id(entry.group): entry.group for parameter, entry in pairs if parameter.group is group}
        group_changes, group_notes = _merged_settings(group, list(by_id.values()), source)
        changes.append(group_changes)
        notes += [f"group {i}: {note}" for note in group_notes]
    changes, rate_notes = imported_rates(groups, changes, cut_off)
    # Without the keys by which a load knows a file of this package, whose settings it would announce.
    merged = [
        {key: value for key, value in {**group, **new}.items() if key not in (LENGTHS, "state_format")}
        for group, new in zip(groups, changes)
    ]
    return merged, notes + rate_notes + _missing_bases(merged, changes)


def _missing_bases(merged: Sequence[Settings], changes: Sequence[Settings]) -> list[str]:
    """Return a note if a scheduler's `initial_lr` came from the source for some groups only, as from AdamW's file."""
    lacking = [str(i) for i, group in enumerate(merged) if "initial_lr" not in group]
    if not lacking or not any("initial_lr" in new for new in changes):
        return []
    return [
        f"group {', '.join(lacking)}: the source has an initial_lr for other groups, and none here. A scheduler with a "
        "last_epoch needs one in every group"
    ]


def _merged_settings(group: Settings, source_groups: Sequence[Settings], source: Source) -> tuple[Settings, list[str]]:
    """Return the settings that `group` gets from its parameters' groups in the source, and notes on the others."""
    branch = branch_by_flag(group, {})
    translations = [translated(source_group, branch, source) for source_group in source_groups]
    changes, notes, meanings = {}, [], other_meanings(group)
    for key in dict.fromkeys(key for settings, _ in translations for key in settings):
        values = [settings.get(key) for settings, _ in translations]
        if any(bool(value != values[0]) for value in values):
            kept = f"stays {group[key]!r}" if key in group else "is not set"
            unlike = " and ".join(dict.fromkeys(map(str, values)))
            notes.append(f"{key} {kept}, because parameters of this group have {unlike} in the source")
        elif key in meanings:
            notes.append(f"{key}={values[0]!r} of the source is not taken: here {meanings[key]}")
        elif key in group or key == "initial_lr":
            changes[key] = values[0]
        else:
            notes.append(f"{key}={values[0]!r} of the source is not a setting here")
    for text in dict.fromkeys(text for _, lost in translations for text in lost):
        notes.append(f"{text} of the source has no counterpart")
    if group["decay_mode"] == "corrected" and changes.get("lr", group["lr"]) != group["lr"]:
        notes.append(f"decay_lr, which is not in the source, stays {group['decay_lr']}")
    if source_groups and branch == "muon":
        stated = {**source.settings["muon"], **source.constants}
        usual = "lr", "weight_decay", "momentum", "ns_coefficients", "ns_steps"
        unstated = [key for key in usual if key not in stated]
        notes += [f"{key} stays {group[key]!r}, because the source has none for Muon's matrices" for key in unstated]
    return changes, notes
