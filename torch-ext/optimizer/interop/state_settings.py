"""The settings that a group gets from another optimizer's groups, and sentences about those that it does not get."""

from __future__ import annotations

from typing import Sequence

from ..parameters.groups import LENGTHS, other_meanings
from ..parameters.setting_values import plain_number_or_tensor
from .state_matching import Entry
from .state_rates import imported_rates
from .state_sources import Settings, Source, branch_by_flag, translated


def merged_groups(
    groups: Sequence[Settings], pairs: Sequence[tuple[Entry, Entry]], source: Source
) -> tuple[list[Settings], list[str]]:
    """Return `groups` with the settings that they get from the source, and notes on the others.

    `pairs` are a parameter of a group and its entry in the source.
    """
    changes, notes = [], []
    for i, group in enumerate(groups):
        # Groups of the source are compared by identity, since they hold tensors.
        by_id = {id(entry.group): entry.group for parameter, entry in pairs if parameter.group is group}
        group_changes, group_notes = _merged_settings(group, list(by_id.values()), source)
        changes.append(group_changes)
        notes += [f"group {i}: {note}" for note in group_notes]
    changes, rate_notes = imported_rates(groups, changes)
    merged = [{**group, **new} for group, new in zip(groups, changes)]
    notes += [*rate_notes, *_other_decay_rates(groups, merged), *_missing_bases(merged, changes)]
    # Lengths are those from before the import, and a load warns of settings in files that have a `state_format`.
    left_out = (LENGTHS, "state_format")
    return [{key: value for key, value in group.items() if key not in left_out} for group in merged], notes


def _other_decay_rates(groups: Sequence[Settings], merged: Sequence[Settings]) -> list[str]:
    """Return a note for each group whose decay goes by its rate's ratio to a `decay_lr` of this optimizer."""
    return [
        f"group {i}: decay_lr, which is not in the source, stays {group['decay_lr']}"
        for i, (group, new) in enumerate(zip(groups, merged))
        if new["decay_mode"] == "corrected" and new["lr"] != group["lr"]
    ]


def _missing_bases(merged: Sequence[Settings], changes: Sequence[Settings]) -> list[str]:
    """Return a note if only some groups have a scheduler's `initial_lr` after the import, as with AdamW's file."""
    lacking = [str(i) for i, group in enumerate(merged) if "initial_lr" not in group]
    if not lacking or not any("initial_lr" in new for new in changes):
        return []
    which = f"{'groups' if len(lacking) > 1 else 'group'} {', '.join(lacking)}"
    return [
        f"{which}: no initial_lr, unlike groups that got theirs from the source. Set one before you make a scheduler "
        "with last_epoch"
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
        elif key == "initial_lr":  # no setting of ours, so that a load would leave a number of NumPy
            changes[key] = plain_number_or_tensor(key, values[0])
        else:
            changes[key] = values[0]
    for text in dict.fromkeys(text for _, lost in translations for text in lost):
        notes.append(f"{text} of the source has no counterpart")
    stated = {key for settings, _ in translations for key in settings}
    taken = changes.keys() & {"lr", "initial_lr"}
    if len(taken) == 1 and {"lr", "initial_lr"} <= stated:  # a rate and that with which it began: both, or neither
        (key,) = taken
        notes.append(f"{key}={changes.pop(key)!r} of the source is not taken, because its other rate is not")
    if source_groups and branch == "muon":
        usual = "lr", "weight_decay", "momentum", "ns_coefficients", "ns_steps"
        unstated = [key for key in usual if key not in {**source.settings["muon"], **source.constants}]
        notes += [f"{key} stays {group[key]!r}, because the source has none for Muon's matrices" for key in unstated]
    return changes, notes
