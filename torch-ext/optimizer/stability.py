"""What rounding allows: where a Gram iteration must restart, and how far float16 lets normalised matrices be scaled up.

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

import torch

from .kernels.formats import unit_roundoff
from .kernels.tracing import constant_while_traced
from .schedules import Schedule, value_at

# The largest change of the result, whose singular values are 1, that rounding a Gram matrix may cause in the worst
# case: one singular value is far larger than all others, and the rounding error falls on the smallest. In practice
# rounding spreads over the matrix, and the change is about this bound divided by the square root of the side.
LIMIT = 2.0

# The largest change where float32 stands in for half precision, whose errors are larger (docs/numerics.md).
_CPU_LIMIT = 1e-2

# The Gram iteration diverges if its m x m matrices are rounded more than in float16.
_GRAM_ROUNDOFF = unit_roundoff(torch.float16)

# The largest part of a sum that may be kept in float16: its range, with 1 % to spare for rounding.
_LARGEST_PART = 0.99 * torch.finfo(torch.float16).max

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


@constant_while_traced
def safe_restarts(
    schedule: Schedule, work_dtype: torch.dtype, roundoff: float, stands_in: bool = False
) -> tuple[int, ...] | None:
    """Return the steps before which the Gram iteration restarts; None if it is not safe, as with bfloat16's `roundoff`.

    The product of a window's steps is rounded to the work dtype. It may be as large as the product of their first
    coefficients, and where X is almost zero, rounding adds noise of that size. In bfloat16 the first step, which has
    the largest coefficient, is therefore a window of its own: then there is as much noise as after the first step of
    the standard iteration. Where float32 `stands_in` for half precision, rounding may change less.
    """
    if roundoff > _GRAM_ROUNDOFF:
        return None
    return restart_positions(schedule, roundoff, work_dtype == torch.bfloat16, _CPU_LIMIT if stands_in else LIMIT)


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


def folded_scale(work_dtype: torch.dtype, m: int, schedule: Schedule) -> float:
    """Return the power of two by which X is multiplied so that entries of X Xᵀ are normal numbers of float16.

    In a normalised m x n matrix they are about 1 / (m sqrt(n)). For large m float16 has lost digits there. The scale is
    about sqrt(m), but small enough that every part of a sum stays in float16's range: at most 8, for all presets.
    """
    # Libraries may cut the sum over k and add its parts in float16; torch allows cuBLAS to do so. By Cauchy and Schwarz
    # a part of an entry of A B is at most the norm of a row of A times that of a column of B, so at most |A|₂ |B|₂.
    # Singular values of X are at most scale * v, where v is the largest of the schedule. So parts of A = X Xᵀ are at
    # most (scale * v)², and parts of A A at most (scale * v)⁴, since the small coefficient c is applied only
    # afterwards. A few dominant rows come close to that. Other products have at most one factor A; their other factors
    # are polynomials of A, which are as small as their coefficients.
    largest = largest_value(schedule)
    scale = 1
    if work_dtype == torch.float16:
        while 2 * scale * scale <= m and 2 * scale * largest <= _LARGEST_PART**0.25:
            scale *= 2
    return float(scale)


@constant_while_traced
def largest_value(schedule: Schedule) -> float:
    """Return the largest singular value that occurs for matrices with values in [0, 1], before or after any step."""
    return _largest_value(schedule)


@functools.lru_cache(maxsize=64)
def _largest_value(schedule: Schedule) -> float:
    peak = largest = 1.0
    for quintic in schedule:
        a, b, c = quintic
        # The values so far fill [0, peak]. A step's maximum is at `peak`, or where its derivative in x² is 0.
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        squares = [(-3 * b + sign * root) / (10 * c) for sign in (1, -1)] if c else [-a / (3 * b)] if b else []
        places = [peak, *(math.sqrt(y) for y in squares if 0 < y < peak * peak)]
        peak = max(abs(value_at(quintic, x)) for x in places)
        largest = max(largest, peak)
    return largest


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
