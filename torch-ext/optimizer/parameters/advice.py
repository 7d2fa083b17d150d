"""What users should decide, in one line with what to write: a warning at construction, and a note in `explain()`."""

from __future__ import annotations

import math
from typing import Iterable, Mapping, NamedTuple, Protocol, Sequence

from torch import Tensor

from .groups import names_of
from .routing import UNDECIDED
from .settings import Group


class Routed(Protocol):
    """What advice reads of a parameter's route."""

    name: str
    shape: tuple[int, ...]
    branch: str
    reason: str


class _Route(NamedTuple):
    name: str
    shape: tuple[int, ...]
    branch: str
    reason: str


def routed(groups: Sequence[Group], reasons: Mapping[Tensor, str]) -> list[Routed]:
    """Return the routes of all parameters of `groups`; those of a wrapper, which nobody routed, count as decided."""
    return [
        _Route(name, tuple(p.shape), "muon" if group["use_muon"] else group["fallback"], reasons.get(p, "use_muon"))
        for group in groups
        for name, p in zip(names_of(group), group["params"])
    ]


def advice(routes: Iterable[Routed]) -> list[str]:
    """Return a line for each thing that a user should decide about these parameters; none where all is well."""
    undecided = [route for route in routes if route.reason == UNDECIDED]
    return [_undecided(undecided)] if undecided else []


def _undecided(routes: Sequence[Routed]) -> str:
    return (
        f"{described(routes)}: stacks of matrices, or convolutions? No name tells, so the fallback updates them. "
        "For stacks (experts, rows, cols) write expert_keys=(...) with a component of their names, or stacked=True in "
        "their group; for convolutions stacked=False; use_muon=False leaves them where they are"
    )


def described(routes: Sequence[Routed]) -> str:
    """Return how many parameters and elements these are, and the largest one."""
    largest = max(routes, key=_elements)
    example = f"{largest.name} {largest.shape}"
    if len(routes) == 1:
        return example
    return f"{len(routes)} parameters ({sum(map(_elements, routes)):,} elements), such as {example}"


def _elements(route: Routed) -> int:
    return math.prod(route.shape)
