"""Which entry of a file belongs to which parameter, and whether the state that another optimizer saved fits."""

from __future__ import annotations

from numbers import Real
from reprlib import repr as shortened
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..parameters.names import bare_name, listed, names_of, repeated
from ..parameters.state import COUNT, MOMENTS
from .state_sources import Settings, Source, branch_by_flag

_BRANCHES = ("muon", "adamw")
# State that does not have the parameter's shape; loading checks it.
_OTHERWISE = (COUNT, "variance_neuron")
# How many problems an error lists.
_SHOWN = 20
_OUT_OF_ORDER = "the source has no names, so its order counted: pass `names`, the names of its parameters in its order"


class Entry(NamedTuple):
    """One parameter in a state dict; `branch` is None if it never had a gradient and nothing else shows the branch."""

    key: Union[int, str]
    name: Optional[str]
    branch: Optional[str]
    group: Settings
    state: Mapping[str, Any]
    shape: tuple[int, ...] = ()  # set only for parameters of the optimizer into which state is imported


def entries_of(state_dict: Mapping[str, Any], branch_of: Callable[..., Optional[str]]) -> list[Entry]:
    """Return the parameters of a state dict in its order."""
    entries = []
    for group in state_dict["param_groups"]:
        names = names_of(group) if "param_names" in group else group.get("names") or [None] * len(group["params"])
        for key, name in zip(group["params"], names):
            state = state_dict["state"].get(key, {})
            if not isinstance(state, Mapping):
                raise TypeError(f"the state of parameter {key} must be a dict, got {shortened(state)}")
            state = dict(state)
            branch = branch_of(group, state)
            state.pop("use_muon", None)  # timm and Moonlight store the branch there
            if state and branch == "adamw" and "step" not in state:
                # dion has a count under another name, and in older files only that of the group.
                count = state.pop("step_dev", group.get("step"))
                state.update({} if count is None else {"step": count})
            # Distributed checkpoints have names in place of positions.
            entries.append(Entry(key, key if isinstance(key, str) else name, branch, group, state))
    return entries


def parameters_of(target: Mapping[str, Any], groups: Sequence[Settings]) -> list[Entry]:
    """Return the parameters of an optimizer, which has these groups and the state dict `target`, in its order."""
    shapes = [tuple(p.shape) for group in groups for p in group["params"]]
    return [each._replace(shape=shape) for each, shape in zip(entries_of(target, branch_by_flag), shapes)]


def matched(
    parameters: list[Entry], entries: list[Entry], source: Source
) -> tuple[list[tuple[Entry, Entry]], list[Entry], list[str]]:
    """Return pairs of parameter and entry (by name, then by order), parameters without an entry, and all problems."""
    known = [entry for entry in entries if entry.name is not None]
    pairs, strangers = matched_by_name(parameters, known)
    unmatched, problems = [], problems_of_names(parameters, known, strangers)
    named = {parameter.key for parameter, _ in pairs}
    unclear = {str(entry.branch) for entry in entries if entry.name is None} - set(_BRANCHES)
    if unclear:
        problems.append(f"the branch of parameters without a name is unclear in the source: {', '.join(unclear)}")
    for branch in _BRANCHES:
        rest = [parameter for parameter in parameters if parameter.branch == branch and parameter.key not in named]
        unnamed = [entry for entry in entries if entry.branch == branch and entry.name is None]
        if not unnamed:
            unmatched += rest
        elif len(rest) != len(unnamed):
            here = f"{len(rest)}: {listed([parameter.name for parameter in rest])}"
            problems.append(
                f"the source has {len(unnamed)} {branch} parameters without names, this optimizer {here}. Pass names, "
                "those of the source in its order, and route as the source does, with is_muon or use_muon"
            )
        else:
            if source.sorts and any(map(_other_shapes, rest, unnamed)):
                rest = sorted(rest, key=lambda parameter: parameter.shape, reverse=True)
            pairs += zip(rest, unnamed)
    return pairs, unmatched, problems + [text for pair in pairs for text in _misfits(*pair, source)]


def matched_by_name(
    parameters: Sequence[Entry], entries: Sequence[Entry]
) -> tuple[list[tuple[Entry, Entry]], list[Entry]]:
    """Return pairs of parameter and entry, and the entries without a parameter.

    Whole names are compared first, then names without the components of wrappers: PEFT's `original_module` and
    `modules_to_save` differ only in these.
    """
    pairs, rest = [], list(entries)
    for key in str, bare_name:
        taken = {parameter.key for parameter, _ in pairs}
        by_name = {key(parameter.name): parameter for parameter in parameters if parameter.key not in taken}
        matches = [(by_name.pop(key(entry.name), None), entry) for entry in rest]
        pairs += [(parameter, entry) for parameter, entry in matches if parameter is not None]
        rest = [entry for parameter, entry in matches if parameter is None]
    return pairs, rest


def problems_of_names(parameters: Sequence[Entry], entries: Sequence[Entry], strangers: Sequence[Entry]) -> list[str]:
    """Return a problem for each of the `strangers`, which have no parameter, and for each name that comes twice."""
    twice = {*repeated(entry.name for entry in entries), *repeated(parameter.name for parameter in parameters)}
    problems = [f"{entry.name} of the source is not here, or comes twice" for entry in strangers]
    return problems + [
        f"several parameters are called {name}: names have to tell them apart. Construct this optimizer from "
        f'module.named_parameters(prefix="..."), and pass `names` of the source'
        for name in sorted(twice & {entry.name for entry in entries})
    ]


def refusal(problems: Sequence[str], hints: Sequence[str] = ()) -> str:
    """Return the text of an error: all problems, or the first ones of very many, and then the hints."""
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n  ".join(["the state does not fit:", *problems[:_SHOWN], *more, *hints])


def hints_on_order(pairs: Sequence[tuple[Entry, Entry]]) -> list[str]:
    """Return what to pass if a parameter and the entry that has its place in the source differ in shape."""
    strange = any(entry.name is None and _other_shapes(parameter, entry) for parameter, entry in pairs)
    return [_OUT_OF_ORDER] if strange else []


def _misfits(parameter: Entry, entry: Entry, source: Source) -> list[str]:
    """Return why an entry of the source does not fit its parameter, in sentences; empty if it does."""
    if entry.branch not in (parameter.branch, None):
        return [f"{parameter.name} belongs to {entry.branch} in the source, and to {parameter.branch} here"]
    wanted = set(source.state[parameter.branch].values())
    unused = source.unused if parameter.branch == "muon" else frozenset()
    if entry.state and set(entry.state) - unused != wanted:
        more = sorted(set(entry.state) - unused - wanted) if wanted <= set(entry.state) else []
        hint = f". Nothing here goes on from {', '.join(more)}: remove it from the file's state to import the rest"
        needs = f"{parameter.name} needs the state {', '.join(sorted(wanted))}, got {', '.join(sorted(entry.state))}"
        return [needs + hint if more else needs]
    values = {key: value for key, value in sorted(entry.state.items()) if key in wanted}
    wrong = [f"{key}={shortened(value)}" for key, value in values.items() if not _is_value(key, value)]
    if wrong:
        return [f"{parameter.name} needs tensors as state and a number as step, the source has {', '.join(wrong)}"]
    if entry.state and MOMENTS in parameter.state and MOMENTS not in source.state[parameter.branch]:
        return [
            f"{parameter.name} needs the state {', '.join(parameter.state)}, got {', '.join(wanted)}: construct the "
            "optimizer with second_moment='none', and set it in its groups after the import"
        ]
    other_shapes = _other_shapes(parameter, entry).items()
    return [
        f"{parameter.name} is {parameter.shape} here, its {key} in the source {shape}" for key, shape in other_shapes
    ]


def _is_value(key: str, value: Any) -> bool:
    """Whether a value of a state is a tensor, or the step a number or a tensor of numbers."""
    if key == "step" and not isinstance(value, Tensor):  # as in old files
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, Tensor) and (key != "step" or not (value.is_complex() or value.dtype == torch.bool))


def _other_shapes(parameter: Entry, entry: Entry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of state tensors that differ from the parameter's and should not."""
    shapes = {key: tuple(value.shape) for key, value in entry.state.items() if isinstance(value, Tensor)}
    return {key: shape for key, shape in shapes.items() if key not in _OTHERWISE and shape != parameter.shape}
