"""The steps of an iteration as the operation `small_polar_` takes them: one list of numbers, four for each step.

They are a, b, c, and 1 if a window ends with this step, else 0. The last step ends one.
"""

from __future__ import annotations

from typing import Sequence

MAX_STEPS = 31  # an int32 has a bit for each step, which says whether a window ends there


def steps_of(windows: Sequence[Sequence[tuple[float, float, float]]]) -> list[float]:
    """Return the list for windows of steps (a, b, c)."""
    return [float(x) for window in windows for i, step in enumerate(window, 1) for x in (*step, i == len(window))]


def check_steps(steps: Sequence[float]) -> None:
    """Raise ValueError unless this is a list of 1 to MAX_STEPS steps."""
    if not 4 <= len(steps) <= 4 * MAX_STEPS or len(steps) % 4 or not steps[-1] or {*steps[3::4]} - {0.0, 1.0}:
        wanted = f"1 to {MAX_STEPS} steps (a, b, c, 1 where a window ends, else 0), of which the last ends one"
        raise ValueError(f"steps must be {wanted}, got {list(steps)}")


def coefficients_and_ends(steps: Sequence[float]) -> tuple[tuple[float, ...], int]:
    """Return all a, b, c in one row, and an integer whose bit i says whether a window ends with step i."""
    coefficients = tuple(x for i, x in enumerate(steps) if i % 4 < 3)
    return coefficients, sum(1 << i for i, end in enumerate(steps[3::4]) if end)
