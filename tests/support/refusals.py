"""What an action that may be refused says."""

from __future__ import annotations

from collections.abc import Callable


def error_of(action: Callable[[], object]) -> str | None:
    """Return the text of the action's ValueError or RuntimeError; None if it goes through."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None
