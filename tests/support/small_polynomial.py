"""What `small_polar` should return, and how far roundings may take it from there."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tests.support.iterations import Carried, standard
from tests.support.spectra import composed

# Polar Express's first steps, slowed by 1.05, and one that ends near 1.
SCHEDULE = (
    (7.845059514757672, -20.004532768024795, 13.069669203136856),
    (3.888039999109367, -2.499220158273262, 0.411573557690163),
    (1.875, -1.25, 0.375),
)
# Multiples of no tile, of one tile and of several, short sides padded to each side there is.
SIZES = [(1, 1), (1, 7), (3, 5), (16, 16), (17, 40), (40, 160), (64, 70), (100, 100), (128, 131)]


def matrices(batch: int, m: int, n: int, seed: int = 0) -> Tensor:
    """Normal entries in float32, but of few bits, so that every dtype holds them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, m, n, generator=generator).bfloat16().float()


def in_windows(schedule, lengths, scale: float) -> list:
    """Return the schedule for X times `scale`, which the last step takes away again, in windows of `lengths` steps."""
    folded = [(a, b / scale**2, c / scale**4) for a, b, c in schedule]
    folded[-1] = tuple(x / scale for x in folded[-1])
    ends = list(itertools.accumulate(lengths))
    return [folded[end - length : end] for end, length in zip(ends, lengths)]


def steps_of(windows) -> list[float]:
    """Return the operation's list: a, b, c of each step and whether its window ends."""
    return [float(x) for window in windows for i, step in enumerate(window, 1) for x in (*step, i == len(window))]


def exact(G: Tensor, schedule, norm: float | None = None) -> Tensor:
    """Return the polynomial of G / norm in float64; `norm` None is G's."""
    U, sigma, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    return U @ torch.diag(composed(schedule, sigma / (norm or torch.linalg.vector_norm(sigma)))) @ Vh


def largest_error(G: Tensor, windows, scale: float, dtype: torch.dtype) -> float:
    """Return how far, in the Frobenius norm, the roundings of the kernel's iteration may take its result.

    `Carried` draws signs for roundings that are all as large as they may be, 2.4 times what is to be expected. The
    norm and the quotient by it, in float32, move X by less than its rounding to the work dtype, which is next.
    """
    X = Carried.exact(scale * G.double() / torch.linalg.matrix_norm(G.double()), 0).to(torch.float32).to(dtype)
    identity = torch.eye(len(G), dtype=torch.float64)
    for window in windows:
        if len(window) == 1:
            X = standard(X, window)
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
    return X.error()
