"""Patterns of names, by which users of `groups_for` set the groups of parameters themselves."""

from __future__ import annotations

from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Iterator, Mapping

from torch import Tensor

from ...parameters.checks import check_parameter
from ...parameters.names import bare_name
from ...parameters.settings import SETTINGS
from ...parameters.synonyms import pop_branch_

Patterns = Mapping[str, Mapping[str, Any]]
# Keys of a group that patterns may set besides settings.
_BESIDES = ("use_muon", "use_fallback", "algorithm", "role")


def overruled(names: list[str], p: Tensor, settings: dict[str, Any], patterns: Patterns) -> dict[str, Any]:
    """Return `settings` updated by the first pattern that matches one of the names."""
    pattern = next((pattern for pattern in patterns if _matches(pattern, names)), None)
    if pattern is None:
        return settings
    changes = dict(patterns[pattern])
    branch = pop_branch_(changes)
    settings = {**settings, **changes, "reason": f"pattern:{pattern}"}
    if branch is None:
        return settings
    with _named(pattern):
        check_parameter(names[0], p, branch == "muon")
    return {**settings, "use_muon": branch == "muon"}


def check_patterns(patterns: Patterns, names: list[str]) -> None:
    """Raise TypeError or ValueError unless each pattern matches one of `names` and sets only what a group may have."""
    if not isinstance(patterns, Mapping):
        raise TypeError(f"patterns must be a dict of settings by patterns of names, got {patterns!r}")
    for pattern, settings in patterns.items():
        if not isinstance(pattern, str) or not isinstance(settings, Mapping):
            raise TypeError(f"each of patterns must be a string with a dict of settings, got {pattern!r}: {settings!r}")
        if not _matches(pattern, names):
            raise ValueError(f"the pattern {pattern!r} matches no parameter; the first names are {names[:3]}")
        unknown = [key for key in settings if key not in SETTINGS and key not in _BESIDES]
        if unknown:
            raise ValueError(
                f"the pattern {pattern!r} sets {unknown}, which are not group keys; these are {', '.join(SETTINGS)}"
            )
        with _named(pattern):
            _check_settings(dict(settings))


def _matches(pattern: str, names: list[str]) -> bool:
    return any(fnmatchcase(form, pattern) for name in names for form in (name, bare_name(name)))


def _check_settings(settings: dict[str, Any]) -> None:
    pop_branch_(settings)
    role = settings.pop("role", "")
    if not isinstance(role, str):
        raise TypeError(f"role must be a string, got {role!r}")
    for key, value in settings.items():
        SETTINGS[key].check(key, value)


@contextmanager
def _named(pattern: str) -> Iterator[None]:
    """Prefix errors about a pattern's settings with the pattern."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"the pattern {pattern!r}: {error}") from None
