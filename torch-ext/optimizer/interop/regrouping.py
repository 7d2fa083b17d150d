"""Import of a state that this package saved in other groups, or in another order: parameters are matched by name."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from ..muon import Muon
from ..parameters.groups import check_format
from ..parameters.names import MADE_UP, listed
from ..parameters.saved_forms import check_form, rounding
from ..parameters.setting_values import flag
from ..parameters.state import REMAINDER, check_loaded
from .state_matching import Entry, matched_by_name, parameters_of, problems_of_names, refusal

# Settings by which state has other parts or the other sign, and their values where older files have none.
_OF_STATE = {"muon": {"maximize": False, "momentum_dtype": None, "second_moment": "none"}, "adamw": {"maximize": False}}
# The key of a group for the steps in which stochastic rounding has drawn seeds.
_COUNTER = "rounding_step"

Pairs = Sequence[tuple[Entry, Entry]]


def regroup_(optimizer: Muon, entries: Sequence[Entry]) -> list[str]:
    """Load the state of `entries`, a file's parameters, into `optimizer` by name; return notes on what is otherwise.

    Raises ValueError, in one list, for parameters that only one side has or whose settings ask for another form of
    state, ValueError for parameters without names, and the errors of `load_state_dict`. Then nothing has changed.
    """
    target = optimizer.state_dict()
    pairs = _matched(parameters_of(target, optimizer.param_groups), entries)
    alike = [(parameter, entry) for parameter, entry in pairs if parameter.branch == entry.branch and entry.state]
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    notes = _notes_on_kept(pairs)
    for parameter, entry in alike:
        name, p = str(parameter.name), tensors[parameter.key]
        check_form(entry.state, name, p, entry.group, parameter.group)
        check_loaded(entry.state, name, p, parameter.group, entry.key)
        how = rounding(entry.state, p, entry.group, parameter.group) if isinstance(entry.key, str) else ""
        notes += [f"the momentum of {name} {how}"] if how else []
    state = {parameter.key: _state_for(parameter, entry) for parameter, entry in pairs}
    groups = [{**group, _COUNTER: _steps_of_rounding(group, alike)} for group in target["param_groups"]]
    optimizer.load_state_dict({**target, "state": state, "param_groups": groups})
    return notes


def _matched(parameters: Sequence[Entry], entries: Sequence[Entry]) -> Pairs:
    """Return the pairs of a parameter and the entry of its name; ValueError, with all problems, if any misfits."""
    if any(MADE_UP.fullmatch(str(parameter.name)) for parameter in parameters):
        raise ValueError(
            "this optimizer's parameters have no names, by which those of the source could be told apart: "
            "write Muon(model.named_parameters())"
        )
    named = [entry for entry in entries if entry.name is not None and not MADE_UP.fullmatch(entry.name)]
    if len(named) < len(entries):
        raise ValueError(
            f"{len(entries) - len(named)} of {len(entries)} parameters of the source have no names, and other groups "
            "have them in another order: pass `names`, the names of the source's parameters in its order, one group "
            "after the other"
        )
    for entry in named:
        check_format(entry.group)
        flag("use_muon of a saved group", entry.group.get("use_muon", True))
    pairs, strangers = matched_by_name(parameters, named)
    problems = problems_of_names(parameters, named, strangers)
    matched = {parameter.key for parameter, _ in pairs}
    lacking = [parameter.name for parameter in parameters if parameter.state and parameter.key not in matched]
    problems += [f"{name} is missing in the source" for name in lacking]  # a frozen parameter has no state
    hints = ["Add new parameters after the import, by add_param_group"] if lacking and not strangers else []
    problems += _other_forms([(one, other) for one, other in pairs if one.branch == other.branch])
    if problems:
        raise ValueError(refusal(problems, hints))
    return pairs


def _other_forms(pairs: Pairs) -> Iterator[str]:
    """Yield a problem for each setting that says which form a state has, if it differs, with its parameters."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for parameter, entry in pairs:
        for key, absent in _OF_STATE[str(parameter.branch)].items():
            here, there = parameter.group[key], entry.group.get(key, absent)
            is_converted = key == "momentum_dtype" and there != "int8"
            if here != there and not is_converted:
                names.setdefault((key, repr(there), repr(here)), []).append(str(parameter.name))
    for (key, there, here), members in names.items():
        yield (
            f"{listed(members)}: {key}={there} in the source and {here} here. Construct the optimizer with the former"
            + ("" if key == "maximize" else ", and set the latter in the groups after the import")
        )


def _state_for(parameter: Entry, entry: Entry) -> Mapping[str, Any]:
    """Return the state in the source, or that here for another branch, with the lower half that the source has."""
    from_source = entry.state if parameter.branch == entry.branch else {}
    halves = {key: half for key, half in {**parameter.state, **entry.state}.items() if key == REMAINDER}
    return {**(from_source or parameter.state), **(halves if parameter.state else {})}


def _steps_of_rounding(group: Mapping[str, Any], pairs: Pairs) -> int:
    """Return in how many steps rounding drew seeds for a group or, in the source, for its parameters."""
    there = (entry.group.get(_COUNTER, 0) for parameter, entry in pairs if parameter.group is group)
    return max(group[_COUNTER], *there, 0)


def _notes_on_kept(pairs: Pairs) -> list[str]:
    """Return notes on the parameters whose state stays as it is here."""
    branches = {"muon": "Muon", "adamw": "AdamW"}
    names: dict[str, list[str]] = {}
    for parameter, entry in pairs:
        if parameter.branch != entry.branch:
            why = f"{branches[str(entry.branch)]}'s in the source and {branches[str(parameter.branch)]}'s here"
            names.setdefault(why, []).append(str(parameter.name))
        elif parameter.state and not entry.state:
            names.setdefault("without state in the source", []).append(str(parameter.name))
    return [f"{listed(members)}: {why}, so the state stays as it is here" for why, members in names.items()]
