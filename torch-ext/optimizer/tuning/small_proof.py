"""Proof of a whole iteration in one launch: the exact result, and how far rounding may move it.

It uses the same kinds of matrices as `proof.py`: normal entries, one dominant row, and rank one.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Callable, Iterator, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.small_steps import steps_of
from ..schedules import with_folded_scale
from .error_propagation import Carried
from .proof import WrongResultError

Steps = Sequence[tuple[float, float, float]]

# The first steps of Polar Express, slowed by 1.05, and one whose result is near 1.
SCHEDULE = (
    (7.845059514757672, -20.004532768024795, 13.069669203136856),
    (3.888039999109367, -2.499220158273262, 0.411573557690163),
    (1.875, -1.25, 0.375),
)
SCALE = 4.0
# A matrix of rank one has a single singular value. Its roundings, about 16, may all go in one direction, which moves it
# 4 times as far as the random signs of `Carried` do.
ONE_WAY = 4.0


def in_windows(schedule: Steps, lengths: Sequence[int], scale: float) -> list[Steps]:
    """Return the schedule in windows of `lengths` steps, for X times `scale` (`with_folded_scale`)."""
    folded, ends = with_folded_scale(schedule, scale), list(itertools.accumulate(lengths))
    return [folded[end - length : end] for end, length in zip(ends, lengths)]


def exact(G: Tensor, schedule: Steps, norm: Optional[float] = None) -> Tensor:
    """Return the polynomial of G / norm in float64; `norm` None means G's Frobenius norm."""
    U, sigma, Vh = torch.linalg.svd(G.cpu().double(), full_matrices=False)
    return U @ torch.diag(_composed(schedule, sigma / (norm or torch.linalg.vector_norm(sigma)))) @ Vh


def largest_error(G: Tensor, windows: Sequence[Steps], scale: float, dtype: torch.dtype) -> float:
    """Return how far, in the Frobenius norm, the roundings of the kernel's iteration may move its result.

    `Carried` draws random signs for roundings of the largest possible size, 2.4 times the expected one. Dividing by the
    norm in float32 moves X by less than rounding it to the work dtype, which comes next.
    """
    with torch.device("cpu"):
        return _carried(G.cpu(), windows, scale, dtype).error()


def _carried(G: Tensor, windows: Sequence[Steps], scale: float, dtype: torch.dtype) -> Carried:
    """Return the result of the kernel's iteration, with the changes by its roundings."""
    X = Carried.exact(scale * G.double() / torch.linalg.matrix_norm(G.double()), 0).to(torch.float32).to(dtype)
    identity = torch.eye(len(G), dtype=torch.float64)
    for window in windows:
        if len(window) == 1:
            ((a, b, c),) = window
            A = X @ X.mT
            X = X.addmm(A.addmm(A, A, beta=b, alpha=c), X, beta=a)
            continue
        R = X @ X.mT
        Q = None
        for i, (a, b, c) in enumerate(window, 1):
            H = R.addmm(R, R, beta=b, alpha=c).add(identity, alpha=a)
            Q = H if Q is None else H @ Q
            if i < len(window):
                R = H @ (H @ R)
            else:
                X = Q @ X
    return X


def check_polar(
    C: Tensor, G: Tensor, windows: Sequence[Steps], scale: float, dtype: torch.dtype, luck: float = 1.0
) -> None:
    """Raise WrongResultError unless each matrix of C is within `luck` times `largest_error` of the exact result."""
    for c, g in zip(C.cpu(), G.cpu()):
        error = torch.linalg.matrix_norm(c.double() - exact(g, SCHEDULE)).item()
        allowed = luck * largest_error(g, windows, scale, dtype)
        if not error <= allowed:
            raise WrongResultError(f"{tuple(G.shape)}: error {error:.1e} where {allowed:.1e} is allowed")


def adversarial(m: int, n: int) -> Tensor:
    """Return G (3, m, n) on the CPU, float32 with few bits: normal entries, one dominant row, and rank one."""
    generator = torch.Generator("cpu").manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    drawn, column, row = normal(3, m, n), normal(m, 1), normal(1, n)
    drawn[1, m // 2] *= 100 * math.sqrt(m)
    drawn[2] = _of_four_bits(column) @ _of_four_bits(row)  # bfloat16 holds these products exactly: the rank stays one
    return drawn.bfloat16().float()


def prove_small(launch: Callable[..., None], like: Tensor, size: tuple[int, int], side: int) -> None:
    """Raise WrongResultError unless a launch is right for matrices of `size`, and for a size that no tile divides.

    `launch(G, C, steps, (scale, eps, dtype))` writes C, on the device and in the work dtype of `like`. A matrix must
    get the same bits alone and in a batch, and a NaN must stay in its matrix.
    """

    def factors(G: Tensor, windows: Sequence[Steps]) -> Tensor:
        C = torch.full_like(G, math.nan, dtype=like.dtype)
        launch(G, C, steps_of(windows), (SCALE, 0.0, like.dtype))
        return C

    ragged = side - 3, 4 * side - 1
    for (m, n), windows in itertools.product(dict.fromkeys((ragged, size)), _proven_windows(like.dtype)):
        G = adversarial(m, n).to(like.device)
        C = factors(G, windows)
        check_polar(C[:2], G[:2], windows, SCALE, like.dtype)
        check_polar(C[2:], G[2:], windows, SCALE, like.dtype, ONE_WAY)
        if any(not torch.equal(factors(G[i : i + 1], windows), C[i : i + 1]) for i in range(len(G))):
            raise WrongResultError(f"{m} x {n}: other bits alone than in a batch")
        G[0, 0, 0] = math.nan
        spoiled = factors(G, windows)
        if not spoiled[0].isnan().all() or not torch.equal(spoiled[1:], C[1:]):
            raise WrongResultError(f"{m} x {n}: a NaN changed another matrix, or did not spread over its own")


def _proven_windows(dtype: torch.dtype) -> Iterator[list[Steps]]:
    """Yield the standard iteration and, in float16, for which Muon uses it on GPUs, a Gram iteration."""
    yield in_windows(SCHEDULE, (1, 1, 1), SCALE)
    if dtype == torch.float16:
        yield in_windows(SCHEDULE, (1, 2), SCALE)


def _of_four_bits(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((16 * mantissa).round() / 16, exponent)


def _composed(schedule: Steps, x: Tensor) -> Tensor:
    for a, b, c in schedule:
        x = x * (a + x * x * (b + x * x * c))
    return x
