"""The state of another Muon loaded into ours: parameters matched, momentum rescaled, settings translated."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Sequence

from torch import Tensor

from ..muon import Muon
from ..parameters.groups import names_of
from ..parameters.routing import bare_name
from .state_sources import SOURCES, Settings, Source, as_ours, settings_of, without_counterpart

_BRANCHES = {True: "muon", False: "adamw"}


class Entry(NamedTuple):
    """One parameter of a source; `branch` is None where it has had no gradient and nothing else says."""

    name: Optional[str]
    branch: Optional[str]
    group: Mapping[str, Any]
    state: Mapping[str, Any]


class Own(NamedTuple):
    """One parameter of ours; `group` and `position` are those in the state dict."""

    name: str
    branch: str
    group: int
    position: int
    parameter: Tensor


def import_state(
    optimizer: Muon,
    state_dict: Mapping[str, Any],
    source: str = "torch",
    *,
    adamw_state_dict: Optional[Mapping[str, Any]] = None,
    names: Optional[Sequence[str]] = None,
) -> list[str]:
    """Load another Muon's `state_dict` into `optimizer`, in place, and return what was not taken over, in sentences.

    The state of the parameters and the settings of their groups are replaced. What was given is copied; momentum keeps
    its dtype.

    Args:
        source: `torch` (torch.optim.Muon), `timm` (with its AdamW or NAdamW), `keller_jordan` (any class of muon.py),
            `motif` or `dion`.
        adamw_state_dict: that of the torch.optim.AdamW beside a torch.optim.Muon; without it the parameters that are
            no matrices stay as they are.
        names: of the source's parameters, in its order, those of `adamw_state_dict` last. Without them the names in
            its groups count, else the order: the k-th matrix there is the k-th here, and so for the rest.

    Sums of gradients, which `motif` and `dion` keep, become averages: times 1 - momentum, of the group as it was saved.
    Settings that mean the same are taken over, with those that a source has as constants; an eps that it adds to the
    norm becomes the norm's lower bound. The sentences name the others: those unknown here, those that the state does
    not hold, and those that differ between groups which are one group here.

    Raises TypeError for an optimizer that is not ours, and ValueError for settings that cannot work or, in one list,
    for all parameters that are missing, unknown, of another branch, of another shape or with other state. Nothing is
    changed then.
    """
    if not isinstance(optimizer, Muon):
        raise TypeError(f"state is imported into a Muon of this package, got {type(optimizer).__name__}")
    kind = SOURCES.get(source)
    if kind is None or (adamw_state_dict is not None and source != "torch"):
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, torch with adamw_state_dict, got {source!r}")
    entries = _entries(state_dict, kind)
    if adamw_state_dict is not None:
        entries += [entry._replace(branch="adamw") for entry in _entries(adamw_state_dict, kind)]
    if names is not None:
        if len(names) != len(entries):
            raise ValueError(f"{len(names)} names were given for {len(entries)} parameters of the source")
        entries = [entry._replace(name=name) for entry, name in zip(entries, names)]
    ours = optimizer.state_dict()
    own = _own_parameters(optimizer)
    pairs, left, problems = _matched(own, entries, kind)
    # A frozen parameter has no state that could be missed.
    left = [o for o in left if o.position in ours["state"]]
    kept = [o for o in left if source == "torch" and adamw_state_dict is None and o.branch == "adamw"]
    problems += [f"{o.name} is missing in the source" for o in left if o not in kept]
    if problems:
        raise ValueError("the state does not fit:\n  " + "\n  ".join(problems))
    state = {o.position: ours["state"][o.position] for o in kept}
    state.update({o.position: as_ours(e.state, e.group, o.branch, kind) for o, e in pairs if e.state})
    groups, notes = _merged_groups(ours["param_groups"], pairs, kind)
    optimizer.load_state_dict({**ours, "state": state, "param_groups": groups})
    return notes


def _entries(state_dict: Mapping[str, Any], source: Source) -> list[Entry]:
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(f"need what state_dict() of an optimizer returns, got the keys {', '.join(state_dict)}")
    entries = []
    for group in state_dict["param_groups"]:
        names = group.get("param_names") or group.get("names") or [None] * len(group["params"])
        for key, name in zip(group["params"], names):
            state = dict(state_dict["state"].get(key, {}))
            branch = source.branch_of(group, state)
            state.pop("use_muon", None)  # timm notes the branch there
            if state and branch == "adamw" and "step" not in state and "step" in group:  # dion counts by group
                state["step"] = group["step"]
            # Distributed checkpoints have names for positions.
            entries.append(Entry(key if isinstance(key, str) else name, branch, group, state))
    return entries


def _own_parameters(optimizer: Muon) -> list[Own]:
    own: list[Own] = []
    for i, group in enumerate(optimizer.param_groups):
        for name, p in zip(names_of(group), group["params"]):
            own.append(Own(name, _BRANCHES[group["use_muon"]], i, len(own), p))
    return own


def _matched(
    own: list[Own], entries: list[Entry], source: Source
) -> tuple[list[tuple[Own, Entry]], list[Own], list[str]]:
    """Return our parameters with theirs, by name and then by order; ours that have none; and what does not fit."""
    by_name = {bare_name(o.name): o for o in own}
    pairs, missing, problems = [], [], []
    for entry in (e for e in entries if e.name is not None):
        o = by_name.pop(bare_name(entry.name), None)
        if o is None:
            problems.append(f"{entry.name} of the source is not here, or comes twice")
        else:
            pairs.append((o, entry))
    named = {o.position for o, _ in pairs}
    unnamed = [entry for entry in entries if entry.name is None]
    unclear = {str(entry.branch) for entry in unnamed} - set(_BRANCHES.values())
    if unclear:
        problems.append(f"parameters of the source without a name are of an unclear branch: {', '.join(unclear)}")
    for branch in _BRANCHES.values():
        ours = [o for o in own if o.branch == branch and o.position not in named]
        theirs = [entry for entry in unnamed if entry.branch == branch]
        if not theirs:
            missing += ours
        elif len(ours) != len(theirs):
            here = ", ".join(o.name for o in ours)
            problems.append(
                f"{len(theirs)} parameters of {branch} in the source, without names, meet {len(ours)}: {here}"
            )
        else:
            if source.sorts and any(_other_shapes(o, entry) for o, entry in zip(ours, theirs)):
                ours = sorted(ours, key=lambda o: o.parameter.shape, reverse=True)
            pairs += zip(ours, theirs)
    return pairs, missing, problems + [text for o, entry in pairs for text in _misfits(o, entry, source)]


def _misfits(o: Own, entry: Entry, source: Source) -> list[str]:
    if entry.branch not in (o.branch, None):
        return [f"{o.name} is a parameter of {entry.branch} in the source, and of {o.branch} here"]
    wanted = set(source.state[o.branch].values())
    if entry.state and set(entry.state) != wanted:
        return [f"{o.name} needs the state {', '.join(sorted(wanted))}, got {', '.join(sorted(entry.state))}"]
    return [
        f"{o.name} is {tuple(o.parameter.shape)} here, its {key} in the source {given}"
        for key, given in _other_shapes(o, entry).items()
    ]


def _other_shapes(o: Own, entry: Entry) -> dict[str, tuple[int, ...]]:
    tensors = {key: value for key, value in entry.state.items() if isinstance(value, Tensor) and key != "step"}
    return {key: tuple(value.shape) for key, value in tensors.items() if value.shape != o.parameter.shape}


def _merged_groups(
    ours: list[Settings], pairs: list[tuple[Own, Entry]], source: Source
) -> tuple[list[Settings], list[str]]:
    """Return our groups with the settings of theirs, and what of those was not taken over."""
    groups, notes = [], []
    for i, group in enumerate(ours):
        branch = _BRANCHES[group["use_muon"]]
        # One of each, told apart by identity: groups hold tensors.
        theirs = list({id(entry.group): entry.group for o, entry in pairs if o.group == i}.values())
        found = [settings_of(other, branch, source) for other in theirs]
        changes, here = {}, []
        for key in dict.fromkeys(key for settings in found for key in settings):
            values = [settings.get(key) for settings in found]
            if any(bool(value != values[0]) for value in values):
                here.append(f"{key} is {' and '.join(map(str, values))} in the source")
            elif key in group or key == "initial_lr":
                changes[key] = values[0]
            else:
                here.append(f"{key}={values[0]!r} of the source is no setting here")
        over = dict.fromkeys(text for other in theirs for text in without_counterpart(other, branch, source))
        here += [f"{text} of the source has no counterpart" for text in over]
        if theirs and branch == "muon":
            here += [f"{key} is not in the state of the source" for key in source.unsaid]
        notes += [f"group {i}: {text}" for text in here]
        groups.append({**group, **changes})
    return groups, notes
