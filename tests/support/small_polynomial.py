"""What tests of `small_polar` share with the package's proof of it, and the sizes that they try."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.support.proofs import small, steps

# The first steps of Polar Express, slowed by 1.05, and one whose result is near 1.
SCHEDULE = (
    (7.845059514757672, -20.004532768024795, 13.069669203136856),
    (3.888039999109367, -2.499220158273262, 0.411573557690163),
    (1.875, -1.25, 0.375),
)
SCALE = small.SCALE
in_windows, steps_of = small.in_windows, steps.steps_of
exact, largest_error = small.exact, small.largest_error

# Multiples of no tile, of one tile and of several, short sides padded to each side there is.
SIZES = [(1, 1), (1, 7), (3, 5), (16, 16), (17, 40), (40, 160), (64, 70), (100, 100), (128, 131)]


def matrices(batch: int, m: int, n: int, seed: int = 0) -> Tensor:
    """Normal entries in float32, but of few bits, so that every dtype holds them; the same on every device."""
    drawn = torch.randn(batch, m, n, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.bfloat16().float().to(torch.get_default_device())


def whole_matrices(batch: int, m: int, n: int) -> Tensor:
    """Whole numbers that every dtype holds. Their norms have the same bits in whatever order squares are added."""
    return matrices(batch, m, n).mul_(16).round_()


def check_polar(C: Tensor, G: Tensor, windows: Sequence, scale: float, dtype: torch.dtype) -> None:
    """Raise WrongResultError unless each matrix of C is within `largest_error` of the result of SCHEDULE."""
    small.check_errors(C, [(exact(g, SCHEDULE), largest_error(g, windows, scale, dtype)) for g in G])


def prove_small(launch: Callable[..., None], side: int, dtype: torch.dtype) -> None:
    """Raise WrongResultError unless a launch on matrices that are padded to `side` rows gives their polynomial."""
    lengths = (1, 2) if dtype == torch.float16 else (1, 1, 1)
    small.prove_small(launch, torch.empty(0, dtype=dtype), (side, 2 * side), side, lengths)
