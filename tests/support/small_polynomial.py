"""What tests of `small_polar` share with the package's proof of it, and the sizes that they try."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.proofs import small, steps

SCHEDULE, SCALE = small.SCHEDULE, small.SCALE
in_windows, steps_of, exact = small.in_windows, steps.steps_of, small.exact
largest_error, check_polar = small.largest_error, small.check_polar

# Multiples of no tile, of one tile and of several, short sides padded to each side there is.
SIZES = [(1, 1), (1, 7), (3, 5), (16, 16), (17, 40), (40, 160), (64, 70), (100, 100), (128, 131)]


def matrices(batch: int, m: int, n: int, seed: int = 0) -> Tensor:
    """Normal entries in float32, but of few bits, so that every dtype holds them; the same on every device."""
    drawn = torch.randn(batch, m, n, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.bfloat16().float().to(torch.get_default_device())


def whole_matrices(batch: int, m: int, n: int) -> Tensor:
    """Whole numbers that every dtype holds. Their norms have the same bits in whatever order squares are added."""
    return matrices(batch, m, n).mul_(16).round_()


def prove_small(launch: Callable[..., None], side: int, dtype: torch.dtype) -> None:
    """Raise WrongResultError unless a launch on matrices that are padded to `side` rows gives their polynomial."""
    lengths = (1, 2) if dtype == torch.float16 else (1, 1, 1)
    small.prove_small(launch, torch.empty(0, dtype=dtype), (side, 2 * side), side, lengths)
