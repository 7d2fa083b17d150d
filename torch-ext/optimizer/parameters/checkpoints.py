"""Checks of a whole saved state: whether this optimizer can load it, and what to write if it cannot."""

from __future__ import annotations

from itertools import product
from reprlib import repr as shortened
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.user_warnings import warn_user
from .checks import check_dtypes, check_fake_mode
from .file_sources import THIS_PACKAGE, advice_for, source_of
from .groups import loaded_group, names_in_file
from .names import MADE_UP, bare_name, listed, named_parameters, names_of
from .saved_forms import check_form, kept_dtype, rounding
from .settings import SCHEDULED, SETTINGS, Group
from .state import BUFFER, KEYS
from .state_values import check_values

# Settings of which a load does not warn: every file brings rates and decay, and some schedulers cycle the others.
_EXPECTED_TO_CHANGE = {*SCHEDULED, "lr_factor", "decay_lr", "momentum", "adamw_betas"}
# Settings that a group of the file brings without other warnings; that of merged groups compares and shows them.
_TAKEN = ("lr", "lr_factor", "weight_decay")
# What to do if parameters have other places than in the file.
_IN_ORDER = "construct the optimizer with its parameters in the order of the file, which its groups list as param_names"
_BY_NAME = (
    'import_state(optimizer, state_dict, "other_groups"), which gives parameters their state by name and leaves groups '
    f"as they are here, or {_IN_ORDER}"
)

Place = tuple[int, int]


class AsSaved:
    """A box for a tensor of a file, so that torch's `load_state_dict` does not move it to the device of its parameter.

    Momentum that belongs in host memory may not fit there.
    """

    def __init__(self, value: Tensor):
        self.value = value


def as_saved(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with this package's tensors in boxes."""
    positions = {position for group in state_dict["param_groups"] for position in group["params"]}
    kept = {
        position: {key: AsSaved(x) if key in KEYS and isinstance(x, Tensor) else x for key, x in each.items()}
        for position, each in state_dict["state"].items()
        if position in positions
    }
    return {**state_dict, "state": {**state_dict["state"], **kept}}


def unbox_(state: Mapping[Any, Any]) -> None:
    """Put the tensors in the place of their boxes, in the state that torch has made of `as_saved`."""
    for each in state.values():
        if isinstance(each, dict):
            each.update({key: box.value for key, box in each.items() if isinstance(box, AsSaved)})


def checked(state_dict: dict[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """Return `state_dict` if this package saved it for the parameters of `groups` in the same order.

    Otherwise raises ValueError, which names the parameters that only one side has or that are in other places, and says
    what to write. Momentum may keep its dtype, so one that the parameter's device does not have raises, too, and so do
    values that steps cannot compute with (`check_values`), before torch moves or casts any of them. Warns of state that
    is lost, and of parameters that get the state or the settings of others. Raises RuntimeError as `check_fake_mode`
    does.
    """
    check_fake_mode(p for group in groups for p in group["params"])
    source, saved = source_of(state_dict), state_dict["param_groups"]
    # torch.optim.Muon's files have the same keys as this package's, and load as they are if the groups match.
    if source not in (THIS_PACKAGE, "torch"):
        raise ValueError(f"the state was saved by another optimizer: {advice_for(source)}")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        why = _difference(groups, saved) if source == THIS_PACKAGE else advice_for(source)
        raise ValueError(f"the state has {_sizes(saved)}, this optimizer has {_sizes(groups)}: {why}")
    here, there = dict(_places(groups)), dict(_places(saved))
    moved = [name for name in here if there.get(name, here[name]) != here[name]]
    if moved:
        before, now = _in_words(there[moved[0]]), _in_words(here[moved[0]])
        raise ValueError(
            f"the same parameters were saved in another order: {moved[0]} was parameter {before}, and is {now} here: "
            + (f"call {_BY_NAME}" if source == THIS_PACKAGE else _IN_ORDER)
        )
    for group, other in zip(groups, saved):
        if other.keys() <= {"params", "param_names"} and any(map(state_dict["state"].get, other["params"])):
            raise ValueError(
                f"the state has no settings for the group of {listed(names_of(group))}, whose parameters it has: they "
                "were saved in other groups. Make the groups as they were, or save and load with StateDictOptions("
                "flatten_optimizer_state_dict=True), and let no group have parameters that were saved with unlike "
                "settings"
            )
    _check_states(groups, saved, state_dict["state"])
    _warn_of_replaced(here, there)
    for group, other in zip(groups, saved):
        _warn_of_merged(group, other, state_dict["state"])
    return state_dict


def _check_states(groups: Sequence[Group], saved: Sequence[Group], states: Mapping[Any, Any]) -> None:
    """Raise TypeError or ValueError unless the state of each parameter fits it, and warn of what is lost of it."""
    lost: list[str] = []
    missing: list[str] = []
    remarks: dict[str, list[str]] = {}
    for group, other in zip(groups, saved):
        for (name, p), i in zip(named_parameters(group), other["params"]):
            state = states.get(i, {})
            check_form(state, name, p, other, group)
            check_values(state, name, p)
            check_dtypes(name, p, {BUFFER: state[BUFFER].dtype} if BUFFER in state else {})
            if p.is_meta and state:
                lost.append(name)
            elif not state and p.requires_grad:  # torch reads no state of frozen parameters
                missing.append(name)
            else:  # torch.distributed.checkpoint finds parameters by name
                how = rounding(state, p, other, group) if isinstance(i, str) else ""
                remarks.setdefault(how or kept_dtype(state, p, {**group, **other}), []).append(name)
    if lost:
        warn_user(
            f"the state of {listed(lost)} is lost: these parameters are on meta, which holds no values. Give them "
            "memory first, then load"
        )
    if missing and any(states.values()):
        warn_user(f"the file has no state of {listed(missing)}: these parameters begin anew, with zero momentum")
    for how, names in remarks.items():
        if how:
            warn_user(f"the momentum of {listed(names)} {how}")


def _warn_of_replaced(here: Mapping[str, Place], there: Mapping[str, Place]) -> None:
    """Warn if some names differ, as after a layer was replaced. Where all do, a wrapper has renamed them."""
    gone, new = _only_there_and_here(here, there)
    if gone and new and here.keys() & there.keys():
        warn_user(
            f"the state has {listed(gone)}, and this optimizer has {listed(new)} instead: these get the state that was "
            "saved in their places. If they are other parameters, del optimizer.state[p] for each of them after loading"
        )


def _warn_of_merged(group: Group, saved: Group, states: Mapping[Any, Any]) -> None:
    """Warn if some parameters of a group get the settings of others, which were in another group of the file.

    torch.distributed.checkpoint gives a group the settings of one group of the file, whose `param_names` come along. If
    none of these is here, they are of another stage of a pipeline, or not the model's names. Settings that this
    optimizer's group has anyway are what its user has asked for, as where stages with the same settings are merged.
    """
    of_file = set(map(bare_name, names_in_file(saved)))
    places = [(name, i) for name, i in zip(names_of(group), saved["params"]) if isinstance(i, str)]
    pairs = [(name, i) for name, i in places if bare_name(name) == bare_name(i)]
    kept = [name for name, _ in pairs if bare_name(name) in of_file]
    merged = [name for name, i in pairs if bare_name(name) not in of_file and states.get(i)]
    if kept and merged and not all(_means(key, saved.get(key, group[key]), group[key]) for key in _TAKEN):
        now = ", ".join(f"{key}={shortened(saved[key])}" for key in _TAKEN if key in saved)
        warn_user(
            f"the settings of {listed(merged)} are now those of {listed(kept)} ({now}), which the file has in another "
            "group: torch gives a whole group the settings of one group of the file. If theirs were others, make the "
            "groups as they were, or set them in param_groups after loading"
        )


def _only_there_and_here(here: Mapping[str, Place], there: Mapping[str, Place]) -> tuple[list[str], list[str]]:
    return sorted(there.keys() - here.keys()), sorted(here.keys() - there.keys())


def loaded_groups(
    groups: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], state: Mapping[Tensor, Any]
) -> list[dict[str, Any]]:
    """Return `loaded_group` for each group and the saved one in the same place; raises the same errors.

    Warns of settings that replace others, such as new ones in a script that resumes an old run, if this package wrote
    the file.
    """
    loaded, first = [], 0
    for group, saved_group in zip(groups, saved):
        loaded.append(loaded_group(group, saved_group, state, first))
        first += len(group["params"])
    _share_numbers_(loaded, groups)
    pairs = [pair for pair, saved_group in zip(zip(groups, loaded), saved) if "state_format" in saved_group]
    _warn_of_replaced_settings(pairs)
    return loaded


def _warn_of_replaced_settings(pairs: Sequence[tuple[Group, Group]]) -> None:
    """Warn of settings that differ between groups and the loaded ones that take their places."""
    texts = dict.fromkeys(
        f"{key}={shortened(new[key])} instead of {shortened(old[key])}"
        for old, new in pairs
        for key in SETTINGS
        if key not in _EXPECTED_TO_CHANGE and not _means(key, old[key], new[key])
    )
    if texts:
        warn_user(
            f"the file's settings replace those of this optimizer: {', '.join(texts)}. To keep yours, set them in "
            "param_groups after loading"
        )


def _means(key: str, value: Any, plain: Any) -> bool:
    """Whether a setting in a group, which its user may have written in another form, has this plain value."""
    try:
        return value == plain or SETTINGS[key].check(key, value) == plain
    except (TypeError, ValueError, RuntimeError):  # a value that no step would take
        return False


def _share_numbers_(loaded: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Let `loaded` groups share the tensors that `groups` share, if values are equal: files may have copies."""
    shared: dict[tuple[str, int], Tensor] = {}
    for (group, here), key in product(zip(loaded, groups), SCHEDULED):
        if isinstance(here[key], Tensor) and isinstance(group[key], Tensor):
            first = shared.setdefault((key, id(here[key])), group[key])
            if first.device == group[key].device and torch.equal(first, group[key]):
                group[key] = first


def _difference(groups: Sequence[Group], saved: Sequence[Group]) -> str:
    """Return why saved groups have other sizes, as far as names show it, and what to do."""
    here, there = (dict(_places(each)) for each in (groups, saved))
    if here and not there:
        return (
            "it was saved without names, which distinguish embeddings and heads from other matrices. Write "
            "Muon(model.parameters()) to continue as before, or start with a new state"
        )
    if there and not here:
        return "it was saved with names, and these parameters have none: write Muon(model.named_parameters())"
    gone, new = _only_there_and_here(here, there)
    if not gone and not new:
        return f"they are the same parameters in other groups: call {_BY_NAME}"
    alone = {"only the state": gone, "only the optimizer": new}
    return "; ".join(f"{where} has {listed(names)}" for where, names in alone.items() if names)


def _places(groups: Sequence[Group]) -> Iterator[tuple[str, Place]]:
    """Yield each name that a user has given, without what wrappers add, with its group and its place there.

    `torch.distributed.checkpoint` finds parameters by name and puts the names into `params`. What it calls
    `param_names` may then be of another stage of a pipeline.
    """
    for number, group in enumerate(groups):
        by_name = [each for each in group["params"] if isinstance(each, str)]
        for place, name in enumerate(by_name or group.get("param_names", ())):
            if not MADE_UP.fullmatch(name):
                yield bare_name(name), (number, place)


def _in_words(place: Place) -> str:
    return f"{place[1]} of group {place[0]}"


def _sizes(groups: Sequence[Group]) -> str:
    sizes = listed([str(len(group["params"])) for group in groups], 6)
    return f"{len(groups)} groups of {sizes} parameters"
