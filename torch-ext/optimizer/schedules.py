"""Coefficient schedules: which odd quintic `a x + b x³ + c x⁵` each step applies to the singular values.

A schedule is a tuple of `(a, b, c)`, one triple per step. Replacing the argument x by x / s turns `(a, b, c)` into
`(a/s, b/s³, c/s⁵)`. With s slightly above 1, values that rounding has pushed above 1 do not diverge.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from numbers import Integral, Real
from typing import Any, Iterable, NamedTuple, Sequence, Tuple, Union

Quintic = Tuple[float, float, float]
Schedule = Tuple[Quintic, ...]

# Kernels take coefficients as float32, whose numbers are below this.
_COEFFICIENTS_END = 2.0**128
# On a narrow interval the four equations of a quintic are the same in most of float64's digits.
_PRECISE = Context(prec=60)
# Exchanges converge quadratically: from any interval, eight give 60 digits. Two more are a reserve.
_EXCHANGES = 10


class Preset(NamedTuple):
    """A published schedule, and the band into which its first five steps map singular values of [1e-3, 1]."""

    coefficients: Schedule
    band: tuple[float, float]
    source: str


PRESETS = {
    "polar_express": Preset(
        (
            (8.237312490495555, -23.157747414558198, 16.680568411445915),
            (4.082441999064835, -2.893047735332586, 0.5252849256975648),
            (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
            (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
            (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
            (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
            (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
            (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
        ),
        (0.862843, 1.130922),
        "Amsel, Persson, Musco, Gower: The Polar Express, arXiv:2505.16932, algorithm 1; "
        "polar_express(lower=1e-3, steps=8, safety=1e-2, cushion=0.02)",
    ),
    "polar_express_safer": Preset(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.0429299351667245, -2.808917465908704, 0.5000178451051299),
            (3.8916678022926563, -2.7724841532176825, 0.5060648178503389),
            (3.285753657755658, -2.3681294933425394, 0.46449024233003117),
            (2.3005307116270983, -1.6111665557258408, 0.3833374427545273),
            (1.8631210546382593, -1.2042160621002727, 0.3421879560523383),
            (1.8382572152247512, -1.1779263289537742, 0.3396513038637379),
            (1.8749999923301852, -1.2499999836060613, 0.374999991275876),
        ),
        (0.846334, 1.141128),
        "arXiv:2505.16932, algorithm 1, with twice the safety; "
        "polar_express(lower=1e-3, steps=8, safety=2e-2, cushion=0.02)",
    ),
    "quintic": Preset(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        (0.474981, 1.145021),
        "Cesista, You, Jordan: Squeezing 1-2% efficiency gains out of Muon by optimizing the Newton-Schulz "
        "coefficients (2025), https://leloykun.github.io/ponder/muon-opt-coeffs/",
    ),
    "original": Preset(
        ((3.4445, -4.7750, 2.0315),),
        (0.470543, 1.202369),
        "Jordan: Muon (2024), https://kellerjordan.github.io/posts/muon/",
    ),
}

# Schedules that are valid only with all their steps, since their first steps alone are another schedule. Their bands
# are those of all steps.
WHOLE = {
    "deepseek_v4": Preset(
        ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
        (0.999999, 1.000539),
        "DeepSeek-V4, section 2.4, algorithm 1, "
        "https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/blob/main/DeepSeek_V4.pdf",
    ),
}
# And other projects' names: that of torch's pull request 179273, and that of Emerging-Optimizers and Paddle.
_BY_NAME = {**PRESETS, **WHOLE, "jordan": PRESETS["original"], "deepseekv4": WHOLE["deepseek_v4"]}
_NAMES = ", ".join(_BY_NAME)


def resolve_schedule(ns_coefficients: Union[str, Sequence], ns_steps: int) -> Schedule:
    """Return the `(a, b, c)` of each of `ns_steps` steps.

    `ns_coefficients` is the name of a preset, one triple, or a sequence of triples. The first `ns_steps` are used; if
    there are fewer, the last one is repeated. Raises ValueError or TypeError for anything else, and for fewer steps
    than a schedule of `WHOLE` has.
    """
    _check_kind("ns_steps", ns_steps, Integral)
    if ns_steps < 1:
        raise ValueError(f"ns_steps must be at least 1, got {ns_steps}")
    triples = _triples(ns_coefficients)
    if isinstance(ns_coefficients, str) and _preset(ns_coefficients) in WHOLE.values() and ns_steps < len(triples):
        raise ValueError(f"{ns_coefficients} has {len(triples)} steps: write ns_steps={len(triples)}, got {ns_steps}")
    return triples[:ns_steps] + triples[-1:] * (ns_steps - len(triples))


def _check_kind(name: str, value: Any, kind: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {'an integer' if kind is Integral else 'a number'}, got {value!r}")


def with_folded_scale(schedule: Schedule, scale: float) -> Schedule:
    """Return the schedule that maps scale * X to the same result as `schedule` maps X.

    Every step except the last keeps the scale: scale * p(x / scale) has the coefficients (a, b / scale², c / scale⁴).
    The last step removes it.
    """
    kept = [(a, b / scale**2, c / scale**4) for a, b, c in schedule[:-1]]
    return (*kept, scaled_argument(schedule[-1], scale))


def polar_express(lower: float = 1e-3, steps: int = 5, safety: float = 1e-2, cushion: float = 0.02) -> Schedule:
    """Return the schedule in which every step is the best odd quintic for the interval that the previous step reached.

    Singular values start in [lower, 1]. Each step takes the quintic with the smallest maximal distance to 1 on
    [max(lower, cushion * upper), upper]. Without the cushion the first steps would only raise the smallest values. All
    steps except the last are slowed: their argument is divided by 1 + `safety`. Raises ValueError outside
    0 < lower < 1, steps >= 1, safety >= 0, 0 <= cushion < 1, and TypeError for `steps` that is not an integer, and for
    other values that are not numbers.

    Source: Amsel et al., The Polar Express, arXiv:2505.16932, algorithm 1 and its section on finite precision.
    """
    _check_kind("steps", steps, Integral)
    for name, value in (("lower", lower), ("safety", safety), ("cushion", cushion)):
        _check_kind(name, value, Real)
    if not 0 < lower < 1 or steps < 1 or not 0 <= safety < math.inf or not 0 <= cushion < 1:
        raise ValueError(
            "polar_express needs 0 < lower < 1, steps >= 1, a finite safety >= 0 and 0 <= cushion < 1, "
            f"got lower={lower}, steps={steps}, safety={safety}, cushion={cushion}"
        )
    schedule = []
    with localcontext(_PRECISE):
        low, high = Decimal(float(lower)), Decimal(1)
        for step in range(steps):
            cushioned = max(low, Decimal(float(cushion)) * high)
            quintic = minimax_quintic(cushioned, high)
            if cushioned > low:
                centre = 2 / (value_at(quintic, low) + value_at(quintic, high))
                quintic = tuple(centre * k for k in quintic)
            if step < steps - 1:
                quintic = scaled_argument(quintic, 1 + Decimal(float(safety)))
            low = value_at(quintic, low)
            high = 2 - low
            schedule.append(tuple(float(k) for k in quintic))
    return tuple(schedule)


def minimax_quintic(low: Decimal, high: Decimal) -> tuple[Decimal, Decimal, Decimal]:
    """Return the odd quintic p with the smallest maximum of |p - 1| on [low, high], 0 <= low < high.

    The error of p alternates at four points: the ends and the two extrema between them (Remez's exchange). Each pass
    solves for p and the error at the current points, and moves the inner two points to the extrema of p.
    """
    # On such a narrow interval the error is about the width cubed, less than float64 resolves. Return the limit: the
    # quintic that touches 1 at `high` with two vanishing derivatives.
    if high - low <= Decimal("5e-6") * high:
        return Decimal(15) / 8 / high, Decimal(-10) / 8 / high**3, Decimal(3) / 8 / high**5
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    error = None
    with localcontext(_PRECISE):
        for _ in range(_EXCHANGES):
            rows = [[x, x**3, x**5, (-1) ** i] for i, x in enumerate([low, *inner, high])]
            before = error
            a, b, c, error = _solve(rows, [Decimal(1)] * 4)
            if error == before:
                break
            # p' = a + 3 b x² + 5 c x⁴ vanishes where x² is one of these two.
            root = (9 * b * b - 20 * a * c).sqrt()
            inner = [((-3 * b - root) / (10 * c)).sqrt(), ((-3 * b + root) / (10 * c)).sqrt()]
    return a, b, c


def value_at(quintic, x):
    """Return a x + b x³ + c x⁵."""
    a, b, c = quintic
    return x * (a + x * x * (b + x * x * c))


def scaled_argument(quintic, factor):
    """Return the coefficients of p(x / factor), for p with the coefficients `quintic`."""
    a, b, c = quintic
    return a / factor, b / factor**3, c / factor**5


def _solve(rows, right):
    """Solve a small linear system by Gaussian elimination with pivoting, in the number type of its entries."""
    system = [[*row, value] for row, value in zip(rows, right)]
    n = len(system)
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(system[i][k]))
        system[k], system[pivot] = system[pivot], system[k]
        for i in range(k + 1, n):
            factor = system[i][k] / system[k][k]
            system[i] = [x - factor * y for x, y in zip(system[i], system[k])]
    solution = [0] * n
    for k in reversed(range(n)):
        known = sum(system[k][j] * solution[j] for j in range(k + 1, n))
        solution[k] = (system[k][n] - known) / system[k][k]
    return solution


def _preset(name: str) -> Preset:
    if name not in _BY_NAME:
        raise ValueError(f"ns_coefficients {name!r} is none of the presets {_NAMES}")
    return _BY_NAME[name]


def without_arrays(value: Any) -> Any:
    """Return an array, a tensor or one of their numbers as Python's lists and numbers, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _triples(ns_coefficients) -> Schedule:
    if isinstance(ns_coefficients, str):
        return _preset(ns_coefficients).coefficients
    plain = without_arrays(ns_coefficients)
    rows = list(plain) if isinstance(plain, Iterable) else []
    if rows and all(isinstance(x, Real) for x in rows):
        rows = [rows]
    if not rows or not all(_is_triple(row) for row in rows):
        raise ValueError(
            f"ns_coefficients must be a preset ({_NAMES}), one (a, b, c) or a sequence of them, all finite in float32, "
            f"got {ns_coefficients!r}"
        )
    return tuple(tuple(float(x) for x in row) for row in rows)


def _is_triple(row) -> bool:
    if not hasattr(row, "__len__") or len(row) != 3:
        return False
    return all(isinstance(x, Real) and abs(without_arrays(x)) < _COEFFICIENTS_END for x in row)
