"""Import of a state that this package saved in other groups, or in another order: parameters are matched by name."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from ..muon import Muon
from ..parameters.groups import check_format
from ..parameters.names import MADE_UP, listed
from ..parameters.state import REMAINDER
from .state_matching import Entry, matched_by_name, parameters_of, problems_of_names, problems_of_shapes, refusal

# Settings by which state has other parts or the other sign.
_OF_STATE = {"muon": ("maximize", "momentum_dtype", "second_moment"), "adamw": ("maximize",)}

Pairs = Sequence[tuple[Entry, Entry]]


def regroup_(optimizer: Muon, entries: Sequence[Entry]) -> list[str]:
    """Load the state of `entries`, a file's parameters, into `optimizer` by name; return notes on what is left out.

    Raises ValueError, in one list, for parameters that have no name, that only one side has, or whose state has another
    form here, and the errors of `load_state_dict`. Then nothing has changed.
    """
    target = optimizer.state_dict()
    pairs = _matched(parameters_of(target, optimizer.param_groups), entries)
    state = {parameter.key: _state_for(parameter, entry) for parameter, entry in pairs}
    optimizer.load_state_dict({**target, "state": state})
    return _notes_on_moved([parameter for parameter, entry in pairs if parameter.branch != entry.branch])


def _matched(parameters: Sequence[Entry], entries: Sequence[Entry]) -> Pairs:
    """Return the pairs of a parameter and the entry of its name; ValueError, with all problems, if any misfits."""
    named = [entry for entry in entries if entry.name is not None and not MADE_UP.fullmatch(entry.name)]
    if len(named) < len(entries):
        raise ValueError(
            f"{len(entries) - len(named)} of {len(entries)} parameters of the source have no names, and other groups "
            "have them in another order: pass `names`, the names of the source's parameters in its order, one group "
            "after the other"
        )
    for entry in named:
        check_format(entry.group)
    pairs, strangers = matched_by_name(parameters, named)
    problems = problems_of_names(parameters, named, strangers)
    matched = {parameter.key for parameter, _ in pairs}
    lacking = [parameter.name for parameter in parameters if parameter.state and parameter.key not in matched]
    problems += [f"{name} is missing in the source" for name in lacking]  # a frozen parameter has no state
    alike = [(parameter, entry) for parameter, entry in pairs if parameter.branch == entry.branch]
    problems += [text for pair in alike for text in problems_of_shapes(*pair)]
    problems += _other_forms(alike)
    if problems:
        raise ValueError(refusal(problems))
    return pairs


def _other_forms(pairs: Pairs) -> Iterator[str]:
    """Yield a problem for each setting that says which form a state has, if it differs, with its parameters."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for parameter, entry in pairs:
        for key in _OF_STATE[str(parameter.branch)]:
            here, there = parameter.group[key], entry.group.get(key, parameter.group[key])
            converted = key == "momentum_dtype" and there != "int8"
            if here != there and not converted:
                names.setdefault((key, repr(there), repr(here)), []).append(str(parameter.name))
    for (key, there, here), members in names.items():
        yield (
            f"{listed(members)}: {key}={there} in the source and {here} here. Construct the optimizer with the former"
            + ("" if key == "maximize" else ", and set the latter in the groups after the import")
        )


def _state_for(parameter: Entry, entry: Entry) -> Mapping[str, Any]:
    """Return the state in the source; for a parameter of another branch that here, with the lower half of its value."""
    if parameter.branch == entry.branch:
        return entry.state
    halves = {key: value for key, value in entry.state.items() if key == REMAINDER and parameter.state}
    return {**parameter.state, **halves}


def _notes_on_moved(parameters: Sequence[Entry]) -> list[str]:
    """Return notes on the parameters that the other branch had in the source."""
    names: dict[str, list[str]] = {"muon": [], "adamw": []}
    for parameter in parameters:
        names[str(parameter.branch)].append(str(parameter.name))
    return [
        f"{listed(members)}: {there}'s in the source and {here}'s here, so the state stays as it is here"
        for members, there, here in ((names["muon"], "AdamW", "Muon"), (names["adamw"], "Muon", "AdamW"))
        if members
    ]
