"""The settings that a group gets from another optimizer's groups, and sentences about those that it does not get."""

from __future__ import annotations

from typing import Any, Sequence

from ..parameters.groups import LENGTHS, other_meanings
from .state_sources import Settings, Source, branch_by_flag, translated


def merged_groups(
    groups: Sequence[Settings], pairs: Sequence[tuple[Any, Any]], source: Source
) -> tuple[list[Settings], list[str]]:
    """Return `groups` with the settings that they get from the source, and notes on the others.

    `pairs` are a parameter of a group and its entry in the source; both have a `group`.
    """
    merged, notes = [], []
    for i, group in enumerate(groups):
        # Groups of the source are compared by identity, since they hold tensors.
        by_id = {id(entry.group): entry.group for parameter, entry in pairs if parameter.group is group}
        changes, group_notes = _merged_settings(group, list(by_id.values()), source)
        merged.append({key: x for key, x in {**group, **changes}.items() if key != LENGTHS})
        notes += [f"group {i}: {note}" for note in group_notes]
    return merged, notes


def _merged_settings(group: Settings, source_groups: Sequence[Settings], source: Source) -> tuple[Settings, list[str]]:
    """Return the settings that `group` gets from its parameters' groups in the source, and notes on the others."""
    branch = branch_by_flag(group, {})
    translations = [translated(source_group, branch, source) for source_group in source_groups]
    changes, notes, meanings = {}, [], other_meanings(group)
    for key in dict.fromkeys(key for settings, _ in translations for key in settings):
        values = [settings.get(key) for settings, _ in translations]
        if any(bool(value != values[0]) for value in values):
            notes.append(f"{key} is {' and '.join(map(str, values))} in the source")
        elif key in meanings:
            notes.append(f"{key}={values[0]!r} of the source is not taken: here {meanings[key]}")
        elif key in group or key == "initial_lr":
            changes[key] = values[0]
        else:
            notes.append(f"{key}={values[0]!r} of the source is not a setting here")
    for text in dict.fromkeys(text for _, lost in translations for text in lost):
        notes.append(f"{text} of the source has no counterpart")
    if "lr" in changes:
        if group["lr_factor"] != 1:
            notes.append(f"lr_factor={group['lr_factor']} of this optimizer became 1, as lr is the source's rate")
        changes["lr_factor"] = 1.0  # the source's lr is the full rate of its parameters
    if group["decay_mode"] == "corrected" and changes.get("lr", group["lr"]) != group["lr"]:
        notes.append(f"decay_lr, which is not in the source, stays {group['decay_lr']}")
    if source_groups and branch == "muon":
        stated = {**source.settings["muon"], **source.constants}
        usual = "lr", "weight_decay", "momentum", "ns_coefficients", "ns_steps"
        unstated = [key for key in usual if key not in stated]
        notes += [f"{key} stays {group[key]!r}, because the source has none for Muon's matrices" for key in unstated]
    return changes, notes
