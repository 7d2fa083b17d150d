"""Warnings point at the line of the user, through whatever wraps a call: hooks, schedulers, decorators."""

from __future__ import annotations

import sys
import warnings

# Frames of torch and of this package are not the user's code.
_INSIDE = ("torch.", f"{__package__.rpartition('.')[0]}.")


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of `text` at the nearest line that is neither torch's nor this package's.

    The number of wrappers in between varies: a scheduler of torch puts one around `step`, and a subclass another.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
