"""Where a Gram iteration must restart: how much it amplifies the rounding of its Gram matrices.

A window of the iteration starts from R = X Xᵀ, computes R after each step, and at its end multiplies X by the product
Q(R) of its steps. X Xᵀ is rounded once, by E, whose entries are up to roundoff times R's. Let X have singular values σ,
so that R has eigenvalues λ = σ². In the basis of X's singular vectors the window's result changes, to first order, by
Q[λᵢ, λⱼ] σⱼ Eᵢⱼ, where Q[λ, μ] = (Q(λ) - Q(μ)) / (λ - μ). Later windows together are an odd function f. They multiply
the symmetric part of a change at i and j by f[τᵢ, τⱼ], where τ are the singular values that enter them, and the
antisymmetric part by (f(τᵢ) + f(τⱼ)) / (τᵢ + τⱼ) (Daleckii and Krein; Higham, Functions of Matrices, section 3.2).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Callable

from .schedules import Schedule

# The largest change of the result, whose singular values are 1, that rounding a Gram matrix may cause in the worst
# case: one singular value is far larger than all others, and the rounding error falls on the smallest. In practice
# rounding spreads over the matrix, and the change is about this bound divided by the square root of the side.
LIMIT = 2.0

# More windows would cost more than they save, except for very long matrices.
MAX_WINDOWS = 3

# The relative distance of two neighbours that stand for one eigenvalue: it leaves half of float64's digits.
_NEAR = 1e-6

# Singular values at which the amplification is computed: zero, and four decades, as schedules start from about 1e-3.
_GRID = (0.0, *(10 ** (i / 20 - 4) for i in range(81)))


@functools.lru_cache(maxsize=64)
def restart_positions(
    schedule: Schedule, roundoff: float, first_alone: bool = False, limit: float = LIMIT
) -> tuple[int, ...] | None:
    """Return the steps before which a Gram iteration restarts: as few as possible, and then where they amplify least.

    `roundoff` is half the distance from 1 to the next number of the dtype that Gram matrices are kept in. The result is
    None if rounding may exceed `limit` even with MAX_WINDOWS windows, or with one window less than there are steps.
    With `first_alone` the first step is a window of its own.
    """
    steps = len(schedule)
    # Many choices have windows in common, and most windows of a long schedule are soon seen to be too long.
    of_window = functools.lru_cache(maxsize=None)(functools.partial(_amplification, schedule, roundoff, limit))
    for windows in range(1, min(MAX_WINDOWS, max(steps - 1, 1 + first_alone)) + 1):
        candidates = itertools.combinations(range(1, steps), windows - 1)
        if first_alone and steps > 1:
            candidates = (restarts for restarts in candidates if restarts[:1] == (1,))
        judged = [(_worst(of_window, steps, restarts), restarts) for restarts in candidates]
        worst, restarts = min(judged, default=(math.inf, ()))
        if worst * roundoff <= limit:
            return restarts
    return None


def amplification(schedule: Schedule, restarts: tuple[int, ...], roundoff: float) -> float:
    """Return the largest change of the result divided by the rounding of a window's Gram matrix, to first order.

    It is the maximum over pairs of singular values on a grid, and of eigenvalues that `roundoff` may push below zero.
    The polynomials are not made for negative eigenvalues and let them grow.
    """
    return _worst(functools.partial(_amplification, schedule, roundoff, math.inf), len(schedule), restarts)


def _worst(of_window: Callable[[int, int], float], steps: int, restarts: tuple[int, ...]) -> float:
    """Return the largest amplification of the windows between restarts; infinite as soon as one is."""
    bounds = [*zip((0, *restarts), (*restarts, steps))]
    worst = 0.0
    for start, stop in (bounds[0], *bounds[:0:-1]):  # the last window before the middle one: it has fewer variants
        worst = max(worst, of_window(start, stop))
        if worst == math.inf:
            break
    return worst


def _amplification(schedule: Schedule, roundoff: float, limit: float, start: int, stop: int) -> float:
    """Return the amplification of the window of steps from `start` to `stop`; infinite where it exceeds `limit`.

    It does not depend on how the steps before and after are cut.
    """
    before, window, later = schedule[:start], schedule[start:stop], schedule[stop:]
    sigmas = [abs(_factor(before, sigma * sigma) * sigma) for sigma in _GRID]
    largest = max(sigmas) * max(sigmas)
    eigenvalues = [-roundoff * largest * share for share in (1, 0.5, 0.25)]  # first, as they mostly exceed a limit
    squares = [sigma * sigma for sigma in sigmas]
    eigenvalues += [*squares, *(x * (1 - _NEAR) for x in squares)]  # for pairs of equal ones: Q[λ, λ] is a derivative
    points = [_Point(x, _factor(window, x), later) for x in eigenvalues]
    worst = 0.0
    for a, b in itertools.combinations(points, 2):
        worst = max(worst, _change(a, b) * largest)
        if worst * roundoff > limit:
            return math.inf
    return worst


def split(schedule: Schedule, restarts: tuple[int, ...]) -> tuple[Schedule, ...]:
    """Cut the schedule before each restart and return the windows, each of them a schedule."""
    bounds = [0, *restarts, len(schedule)]
    return tuple(schedule[start:stop] for start, stop in zip(bounds, bounds[1:]))


class _Point:
    """An eigenvalue of a window's R, its factor, and its singular value at the window's end and after all windows."""

    def __init__(self, eigenvalue: float, factor: float, later: Schedule):
        self.eigenvalue, self.factor = eigenvalue, factor
        self.reached = factor * math.sqrt(max(eigenvalue, 0.0))
        self.final = self.reached * _factor(later, self.reached * self.reached)


def _change(a: _Point, b: _Point) -> float:
    """Return the change of the result for a change of R of Frobenius norm 1 in the entries of these two eigenvalues.

    Infinite if their polynomials overflow.
    """
    if a.eigenvalue == b.eigenvalue:
        return 0.0
    of_factor = abs((a.factor - b.factor) / (a.eigenvalue - b.eigenvalue))
    of_factor *= math.sqrt((max(a.eigenvalue, 0.0) + max(b.eigenvalue, 0.0)) / 2)
    apart, along = a.reached - b.reached, a.reached + b.reached
    symmetric = abs((a.final - b.final) / apart) if apart else 0.0
    antisymmetric = abs((a.final + b.final) / along) if along else 0.0
    change = of_factor * max(symmetric, antisymmetric)
    return math.inf if math.isnan(change) else change  # `max` would pass over NaN


def _factor(steps: Schedule, eigenvalue: float) -> float:
    """Return the factor by which `steps` multiply the singular vectors of X that belong to this eigenvalue of X Xᵀ."""
    product = 1.0
    for a, b, c in steps:
        h = a + eigenvalue * (b + eigenvalue * c)
        product *= h
        eigenvalue *= h * h
    return product
