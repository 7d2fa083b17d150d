"""Matching of a state without names to parameters, by shapes and by the order of parameters."""

from __future__ import annotations

import itertools
from typing import Mapping, Optional, Sequence

from torch import Tensor

from ..muon import Muon
from ..parameters.names import named_parameters, names_of
from ..parameters.routing import reason_of
from .state_matching import Entry

Shape = tuple[int, ...]

_REMEDY = (
    "the source has no names, so its order must be that of this optimizer's parameters. Pass `names`, the names of the "
    "source's parameters in its order, one group after the other"
)


def given_parameters(optimizer: Muon) -> list[tuple[str, Shape]]:
    """Return the names and shapes of parameters in the order in which the user passed them to the optimizer.

    Raises ValueError if a wrapper has replaced parameters since, because the order of the new ones is unknown.
    """
    order = {p: number for number, p in enumerate(optimizer._reasons)}  # routing recorded them in this order
    named = [pair for group in optimizer.param_groups for pair in named_parameters(group)]
    strange = [name for name, p in named if p not in order]
    if strange:
        raise ValueError(f"{strange[0]} was put here by a wrapper, so its place in the order is unknown: {_REMEDY}")
    return [(name, tuple(p.shape)) for name, p in sorted(named, key=lambda pair: order[pair[1]])]


def shapes_by_group(entries: Sequence[Entry]) -> list[list[Optional[Shape]]]:
    """Return the shapes of `entries`, group by group; None for empty states."""
    groups: dict[int, list[Optional[Shape]]] = {}
    for entry in entries:
        average = entry.state.get("exp_avg")
        shape = tuple(average.shape) if isinstance(average, Tensor) else None
        groups.setdefault(id(entry.group), []).append(shape)
    return list(groups.values())


def names_in_order(groups: Sequence[Sequence[Optional[Shape]]], named: Sequence[tuple[str, Shape]]) -> list[str]:
    """Return the name of each parameter of the source, one group after the other.

    `groups` have the shapes of their parameters (None if unknown), each group in the order of `named`. Raises
    ValueError if shapes do not fit, or if the next parameter may belong to several groups.
    """
    if len(named) != sum(map(len, groups)):
        raise ValueError(f"the source has {sum(map(len, groups))} parameters, this optimizer {len(named)}: {_REMEDY}")
    names: list[list[str]] = [[] for _ in groups]
    for name, shape in named:
        left = [number for number, shapes in enumerate(groups) if len(names[number]) < len(shapes)]
        fitting = [number for number in left if groups[number][len(names[number])] in (shape, None)]
        if len(fitting) != 1:
            what = f"it may come next in groups {fitting}" if fitting else "it comes next in no group of the source"
            raise ValueError(f"{name} {shape}: {what}. {_REMEDY}")
        names[fitting[0]].append(name)
    return list(itertools.chain.from_iterable(names))


def given_groups(optimizer: Muon) -> dict[str, int]:
    """Return the number of the group in which the user passed each parameter, by the parameter's name.

    Routing cuts a group into two halves, Muon's and the other branch's: these are one. A group that says its branch
    itself is no half, and neither is one whose parameters all came after those of the group before it: the user may
    have passed the two.
    """
    order = {p: place for place, p in enumerate(optimizer._reasons)}
    numbers, number, last = {}, -1, -1  # the last place in the group before, if this one may be its other half
    for group in optimizer.param_groups:
        places = [order[p] for p in group["params"]]
        says_branch = all(optimizer._reasons[p] == reason_of(group) for p in group["params"])
        is_other_half = not says_branch and not group["use_muon"] and min(places, default=last) < last
        number += not is_other_half
        last = max(places, default=-1) if group["use_muon"] and not says_branch else -1
        numbers.update(dict.fromkeys(names_of(group), number))
    return numbers


def orders_that_may_differ(pairs: Sequence[tuple[Entry, Entry]], numbers: Optional[Mapping[str, int]]) -> list[str]:
    """Return a problem for each shape whose parameters are in more groups here than in the source, or in fewer.

    `pairs` are a parameter and the entry that has its place in the source. With other groups the order of the source
    differs from this optimizer's, or may differ: muon.py's example has a group of the head before that of the
    embedding. Each branch counts by itself, as both have orders of their own, unless the source has one order for all:
    then `numbers`, which else is None, says by name in which group the user passed a parameter, and shapes have told
    groups of the source apart.
    """
    example = "as in [name for name, _ in model.named_parameters()]"
    if numbers is None:
        example = "with adamw_state_dict first those of the matrices' file, then its own"
    here: dict[tuple[Shape, str], set[int]] = {}
    there: dict[tuple[Shape, str], set[int]] = {}
    for parameter, entry in pairs:
        kind = parameter.shape, f"{parameter.branch} " if numbers is None else ""
        here.setdefault(kind, set()).add(id(parameter.group) if numbers is None else numbers[parameter.name])
        there.setdefault(kind, set()).add(id(entry.group))
    return [
        f"{kind[1]}parameters {kind[0]} are in {len(groups)} group{'s' * (len(groups) > 1)} here and in "
        f"{len(there[kind])} of the source: {_REMEDY}, {example}"
        for kind, groups in here.items()
        if len(groups) > len(there[kind]) or (numbers is None and len(groups) < len(there[kind]))
    ]
