"""Where a Gram iteration has to restart: how far it amplifies the rounding of its Gram matrices.

A window of the iteration starts from R = X Xᵀ, follows R through the steps and applies their product Q(R) to X at its
end. X Xᵀ is rounded once, by E with entries up to roundoff times R's. To first order Q changes by the matrix with the
entries Q[λᵢ, λⱼ] Eᵢⱼ in the eigenvectors of R, where Q[λ, μ] = (Q(λ) - Q(μ)) / (λ - μ) (Daleckii and Krein; Higham,
Functions of Matrices, section 3.2), and X by that times σⱼ. Later windows multiply row i once more by their own Q.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Sequence

from .schedules import Quintic, Schedule

# The largest change of the result, whose singular values are 1, that the rounding of a Gram matrix may make at
# worst: one singular value outweighs all others, and the rounding falls on the smallest. Matrices show about that over
# the square root of their side, over which rounding spreads.
LIMIT = 8.0

# More windows cost more than they save for all but the longest matrices.
MAX_WINDOWS = 3

# Singular values at which the amplification is taken: four decades, as schedules start from about 1e-3, and zero.
_GRID = (0.0, *(10 ** (i / 10 - 4) for i in range(41)))


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

    Eigenvalues that `roundoff` may push below zero count too: steps that do not expect them let them grow.
    """
    windows = split(schedule, restarts)
    sigmas, worst = _GRID, 0.0
    for k, window in enumerate(windows):
        largest = max(sigmas) * max(sigmas)
        eigenvalues = [sigma * sigma for sigma in sigmas] + [-roundoff * largest * share for share in (0.25, 0.5, 1)]
        values = [_factor(window, x) for x in eigenvalues]
        reached = [abs(q) * math.sqrt(max(x, 0)) for q, x in zip(values, eigenvalues)]
        gains = [_gain(windows[k + 1 :], sigma) for sigma in reached]
        for (x, q, gain), (y, p) in itertools.product(zip(eigenvalues, values, gains), zip(eigenvalues, values)):
            if x != y:
                worst = max(worst, abs((q - p) / (x - y)) * largest * math.sqrt(max(y, 0)) * gain)
        sigmas = reached[: len(sigmas)]
    return worst


def split(schedule: Schedule, restarts: tuple[int, ...]) -> tuple[Schedule, ...]:
    """Return the schedule's windows, each a schedule."""
    bounds = [0, *restarts, len(schedule)]
    return tuple(schedule[start:stop] for start, stop in zip(bounds, bounds[1:]))


def _factor(window: tuple[Quintic, ...], eigenvalue: float) -> float:
    """Return what a window multiplies the singular vectors of this eigenvalue of X Xᵀ with."""
    product = 1.0
    for a, b, c in window:
        h = a + eigenvalue * (b + eigenvalue * c)
        product *= h
        eigenvalue *= h * h
    return product


def _gain(windows: Sequence[Schedule], sigma: float) -> float:
    product = 1.0
    for window in windows:
        q = _factor(window, sigma * sigma)
        product, sigma = product * q, sigma * q
    return abs(product)
