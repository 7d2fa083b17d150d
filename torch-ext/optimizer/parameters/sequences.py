"""Sequences: what counts as one, and groups of their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Hashable, Iterable, TypeVar

Member = TypeVar("Member")


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence but not a string: a list, a tuple, or OmegaConf's ListConfig."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def grouped(members: Iterable[Member], key: Callable[[Member], Hashable]) -> list[list[Member]]:
    """Return groups of members with equal keys, in the order of their first members."""
    groups: dict[Hashable, list[Member]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return list(groups.values())
