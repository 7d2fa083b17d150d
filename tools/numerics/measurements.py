"""The measurements for docs/numerics.md: errors against the exact polynomial, for chosen singular values."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from tests.support.spectra import SPECTRA, composed, one_large, singular_vectors

STEPS = 5
SIZE = (256, 640)
SEEDS = (0, 1, 2)
CASES = (
    ("float32", "standard"),
    ("float32", "gram"),
    ("float16", "standard"),
    ("float16", "gram"),
    ("float16", "gram_float32"),
    ("bfloat16", "standard"),
    ("bfloat16", "gram_float32"),
)
RESTART_DTYPES = ("float32", "float16", "bfloat16")
RESTARTS = ((), (1,), (2,), (3,), (4,), (1, 3), (2, 4))
# Beside the zoo, of which it is the worst kind: one large value, all others equal.
ONE_LARGE = (0.1, 0.03, 0.01)
BAND_STEPS = (3, 4, 5, 6, 8)
SIDES = (64, 128, 256, 512, 1024, 2048)
# Larger iterations would take most of the total time.
LARGEST_ITERATION = 1024


def measure(kernel: ModuleType, size: tuple[int, int] = SIZE, sides: Sequence[int] = SIDES) -> dict:
    """Return all tables as lists of rows; numbers that are not finite are None."""
    return {
        "size": list(size),
        "seeds": list(SEEDS),
        "errors": list(errors(kernel, size)),
        "restarts": list(restarts(kernel, size)),
        "limit": kernel.stability.LIMIT,
        "schedules": {
            name: {"band": preset.band, "coefficients": kernel.schedules.resolve_schedule(name, STEPS)}
            for name, preset in kernel.schedules.PRESETS.items()
        },
        "bands": list(bands(kernel)),
        "scales": [scale_row(kernel, m) for m in sides],
    }


def errors(kernel: ModuleType, size: tuple[int, int]) -> Iterator[dict]:
    """Yield the relative error of `orthogonalize` for each schedule, spectrum, dtype and method, over the seeds."""
    for name in kernel.schedules.PRESETS:
        schedule = kernel.schedules.resolve_schedule(name, STEPS)
        for spectrum, make in SPECTRA.items():
            cases = [Case(make, size, seed, schedule) for seed in SEEDS]
            for dtype, method in CASES:
                options = dict(dtype=getattr(torch, dtype), method=method)
                samples = [case.error(kernel.orthogonalize(case.G.float(), name, STEPS, **options)) for case in cases]
                error = math.sqrt(sum(e * e for e in samples) / len(samples))
                yield dict(schedule=name, spectrum=spectrum, dtype=dtype, method=method, error=short(error))


@functools.cache
def vectors(size: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    return singular_vectors(*size, seed)


class Case:
    """A matrix of norm 1 with a chosen spectrum, and the schedule's exact result for it, float64."""

    def __init__(self, make, size: tuple[int, int], seed: int, schedule):
        sigma = make(min(size))
        sigma = sigma / sigma.norm()
        left, right = vectors(size, seed)
        self.G = (left * sigma) @ right.mT
        self.exact = (left * composed(schedule, sigma)) @ right.mT

    def error(self, factor: Tensor) -> float:
        return relative(factor, self.exact)


def restarts(kernel: ModuleType, size: tuple[int, int]) -> Iterator[dict]:
    """Yield for each restart the bound and the worst error over spectra; None is the standard iteration."""
    makes = [*SPECTRA.values(), *(functools.partial(one_large, rest=rest) for rest in ONE_LARGE)]
    for name in kernel.schedules.PRESETS:
        schedule = kernel.schedules.resolve_schedule(name, STEPS)
        cases = [Case(make, size, SEEDS[0], schedule) for make in makes]
        for dtype in RESTART_DTYPES:
            for chosen in (None, *RESTARTS):
                worst = max(
                    case.error(run(kernel, case.G.to(getattr(torch, dtype)), schedule, chosen)) for case in cases
                )
                bound = None if chosen is None else bound_of(kernel, schedule, chosen, getattr(torch, dtype))
                yield dict(schedule=name, dtype=dtype, restarts=chosen, bound=bound, error=short(worst))


def bound_of(kernel: ModuleType, schedule, restarts: tuple[int, ...], dtype: torch.dtype) -> float | None:
    """Return the number that `stability` compares with its limit."""
    roundoff = torch.finfo(dtype).eps / 2
    return short(kernel.stability.amplification(schedule, restarts, roundoff) * roundoff)


def bands(kernel: ModuleType) -> Iterator[dict]:
    """Yield where each preset takes the singular values of [1e-3, 1], by its number of steps."""
    sigma = torch.logspace(-3, 0, 200_001, dtype=torch.float64)
    for name in kernel.schedules.PRESETS:
        for steps in BAND_STEPS:
            values = composed(kernel.schedules.resolve_schedule(name, steps), sigma)
            low, high = values.min().item(), values.max().item()
            yield dict(schedule=name, steps=steps, low=round(low, 4), high=round(high, 4))


def scale_row(kernel: ModuleType, m: int) -> dict:
    """Return what float16's folded scale changes for a Gaussian m x m matrix: its Gram matrix, and the result."""
    G = torch.randn(m, m, generator=torch.Generator().manual_seed(0))
    schedule = kernel.schedules.resolve_schedule("polar_express", STEPS)
    folded = kernel.stability.folded_scale(torch.float16, m, schedule)
    row = dict(m=m, scale=folded)
    exact = None
    if m <= LARGEST_ITERATION:
        exact = kernel.orthogonalize(G, dtype=torch.float32, method="standard").double()
    for label, scale in (("without", 1.0), ("with", folded)):
        X = kernel.kernels.normalization.normalize(G, torch.float16, 0.0, scale)
        product = torch.mm(X, X.mT).double()
        row[f"product_{label}"] = short(relative(product, (X.float() @ X.float().mT).double()))
        steps = kernel.schedules.with_folded_scale(schedule, scale)
        for method, chosen in (("standard", None), ("gram", (2,))):
            error = None if exact is None else short(relative(run(kernel, X, steps, chosen), exact))
            row[f"{method}_{label}"] = error
    return row


def run(kernel: ModuleType, X: Tensor, schedule, restarts: tuple[int, ...] | None) -> Tensor:
    """Return the standard iteration, or the Gram iteration with these restarts, over torch's products."""
    products = kernel.kernels.products.SINGLE
    steps = kernel.kernels.newton_schulz
    if restarts is None:
        return steps.newton_schulz(X, schedule, products)
    return steps.gram_newton_schulz(X, kernel.stability.split(schedule, restarts), products, X.dtype)


def relative(actual: Tensor, exact: Tensor) -> float:
    """Return |actual - exact| / |exact|, infinite where anything is not finite."""
    error = ((actual.double() - exact).norm() / exact.norm()).item()
    return error if math.isfinite(error) else math.inf


def short(number: float) -> float | None:
    """Return three digits; on another processor fewer would be the same."""
    return float(f"{number:.3g}") if math.isfinite(number) else None
