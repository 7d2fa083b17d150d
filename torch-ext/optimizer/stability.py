"""Where a Gram iteration has to restart: how far it amplifies the rounding of its Gram matrices.

A window of the iteration starts from R = X Xᵀ, follows R through the steps and applies their product Q(R) to X at its
end. X Xᵀ is rounded once, by E with entries up to roundoff times R's. In the singular vectors of X, with singular
values σ and eigenvalues λ = σ² of R, the window's result changes to first order by Q[λᵢ, λⱼ] σⱼ Eᵢⱼ, where
Q[λ, μ] = (Q(λ) - Q(μ)) / (λ - μ). Later windows, together an odd function f, multiply the symmetric part of a change at
i and j by f[τᵢ, τⱼ], τ being the singular values that they get, and the antisymmetric part by
(f(τᵢ) + f(τⱼ)) / (τᵢ + τⱼ) (Daleckii and Krein; Higham, Functions of Matrices, section 3.2).
"""

from __future__ import annotations

import functools
import itertools
import math

from .schedules import Schedule

# The largest change of the result, whose singular values are 1, that the rounding of a Gram matrix may make at worst:
# one singular value outweighs all others, and the rounding falls on the smallest. Matrices show about that over the
# square root of their side, over which rounding spreads.
LIMIT = 2.0

# More windows cost more than they save for all but the longest matrices.
MAX_WINDOWS = 3

# How far apart neighbours are that stand for one eigenvalue, relative to it: half of float64's digits are left.
_NEAR = 1e-6

# Singular values at which the amplification is taken: four decades, as schedules start from about 1e-3, and zero.
_GRID = (0.0, *(10 ** (i / 20 - 4) for i in range(81)))


@functools.lru_cache(maxsize=64)
def restart_positions(schedule: Schedule, roundoff: float) -> tuple[int, ...] | None:
    """Return the steps before which a Gram iteration restarts: the fewest, and of as many those that amplify least.

    `roundoff` is half the distance from 1 to the next number of the dtype that Gram matrices are kept in. None: with
    up to MAX_WINDOWS windows, fewer than steps, rounding may exceed LIMIT.
    """
    steps = len(schedule)
    for windows in range(1, min(MAX_WINDOWS, max(steps - 1, 1)) + 1):
        candidates = itertools.combinations(range(1, steps), windows - 1)
        worst, restarts = min((amplification(schedule, restarts, roundoff), restarts) for restarts in candidates)
        if worst * roundoff <= LIMIT:
            return restarts
    return None


def amplification(schedule: Schedule, restarts: tuple[int, ...], roundoff: float) -> float:
    """Return the largest change of the result over the rounding of a window's Gram matrix, to first order.

    It is taken over pairs of singular values on a grid, and over those that `roundoff` may push below zero: steps that
    do not expect them let them grow.
    """
    windows = split(schedule, restarts)
    sigmas, worst = _GRID, 0.0
    for k, window in enumerate(windows):
        largest = max(sigmas) * max(sigmas)
        eigenvalues = [sigma * sigma for sigma in sigmas]
        eigenvalues += [x * (1 - _NEAR) for x in eigenvalues]  # for pairs that are one: Q[λ, λ] is the derivative
        eigenvalues += [-roundoff * largest * share for share in (0.25, 0.5, 1)]
        later = tuple(step for after in windows[k + 1 :] for step in after)
        points = [_Point(x, _factor(window, x), later) for x in eigenvalues]
        worst = max(worst, *(_change(a, b) * largest for a, b in itertools.combinations(points, 2)))
        sigmas = [abs(point.reached) for point in points[: len(sigmas)]]
    return worst


def split(schedule: Schedule, restarts: tuple[int, ...]) -> tuple[Schedule, ...]:
    """Return the schedule's windows, each a schedule."""
    bounds = [0, *restarts, len(schedule)]
    return tuple(schedule[start:stop] for start, stop in zip(bounds, bounds[1:]))


class _Point:
    """An eigenvalue of a window's R: the factor of it, the singular value it becomes, and that after the rest."""

    def __init__(self, eigenvalue: float, factor: float, later: Schedule):
        self.eigenvalue, self.factor = eigenvalue, factor
        self.reached = factor * math.sqrt(max(eigenvalue, 0.0))
        self.final = self.reached * _factor(later, self.reached * self.reached)


def _change(a: _Point, b: _Point) -> float:
    """Return how far a change of R between these two, of Frobenius norm 1, changes the result."""
    if a.eigenvalue == b.eigenvalue:
        return 0.0
    own = abs((a.factor - b.factor) / (a.eigenvalue - b.eigenvalue))
    own *= math.sqrt((max(a.eigenvalue, 0.0) + max(b.eigenvalue, 0.0)) / 2)
    apart, along = a.reached - b.reached, a.reached + b.reached
    symmetric = abs((a.final - b.final) / apart) if apart else 0.0
    antisymmetric = abs((a.final + b.final) / along) if along else 0.0
    return own * max(symmetric, antisymmetric)


def _factor(steps: Schedule, eigenvalue: float) -> float:
    """Return what `steps` multiply the singular vectors of this eigenvalue of X Xᵀ with."""
    product = 1.0
    for a, b, c in steps:
        h = a + eigenvalue * (b + eigenvalue * c)
        product *= h
        eigenvalue *= h * h
    return product
