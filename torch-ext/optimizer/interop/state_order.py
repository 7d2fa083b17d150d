"""Which parameters an unnamed state of AdamW is of: by shapes, and by the order in which both optimizers had them."""

from __future__ import annotations

from typing import Optional, Sequence

from ..muon import Muon
from ..parameters.groups import names_of

Shape = tuple[int, ...]

_REMEDY = (
    "the source has no names, and is taken to be in the order of this optimizer's parameters. Give names, of the "
    "source's parameters in its order, one group after the other"
)


def given_parameters(optimizer: Muon) -> list[tuple[str, Shape]]:
    """Return the names and shapes of parameters in the order in which the optimizer was given them.

    Raises ValueError where a wrapper has put others in their place since, of which no order is known.
    """
    order = {p: number for number, p in enumerate(optimizer._reasons)}  # routing has seen them one after the other
    named = [pair for group in optimizer.param_groups for pair in zip(names_of(group), group["params"])]
    strange = [name for name, p in named if p not in order]
    if strange:
        raise ValueError(f"{strange[0]} was put here by a wrapper, and its order is not known: {_REMEDY}")
    return [(name, tuple(p.shape)) for name, p in sorted(named, key=lambda pair: order[pair[1]])]


def names_in_order(groups: Sequence[Sequence[Optional[Shape]]], given: Sequence[tuple[str, Shape]]) -> list[str]:
    """Return the name of each parameter of the source, one group after the other.

    `groups` have their parameters' shapes, None where that is not known, each in the order of `given`. Raises
    ValueError where shapes do not fit, or where the next parameter may be of several groups.
    """
    if len(given) != sum(map(len, groups)):
        raise ValueError(f"{sum(map(len, groups))} parameters of the source meet {len(given)} here: {_REMEDY}")
    names: list[list[str]] = [[] for _ in groups]
    for name, shape in given:
        left = [number for number, shapes in enumerate(groups) if len(names[number]) < len(shapes)]
        fitting = [number for number in left if groups[number][len(names[number])] in (shape, None)]
        if len(fitting) != 1:
            what = f"groups {fitting} may have it next" if fitting else "no group of the source has it next"
            raise ValueError(f"{name} {shape}: {what}. {_REMEDY}")
        names[fitting[0]].append(name)
    return [name for some in names for name in some]
