"""Matrices with chosen singular values: the only inputs on which an orthogonalization can be judged."""

import torch

SPECTRA = {
    "flat": lambda k: torch.ones(k, dtype=torch.float64),
    "power_law": lambda k: torch.arange(1, k + 1, dtype=torch.float64).pow(-1.0),
    "geometric": lambda k: torch.logspace(0, -6, k, dtype=torch.float64),
    "clustered": lambda k: torch.where(torch.arange(k) % 2 == 0, 1.0, 1e-2).double(),
    "rank_deficient": lambda k: (torch.arange(k) < (k + 1) // 2).double(),
    "one_huge": lambda k: torch.where(torch.arange(k) == 0, 1e3, 1.0).double(),
}


def with_spectrum(sigma, m, n, seed):
    """Return a float64 matrix (m, n) with the singular values `sigma`, min(m, n) of them."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left = torch.linalg.qr(torch.randn(m, k, dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64, generator=generator)).Q
    return left @ torch.diag(sigma) @ right.mT


def composed(schedule, x):
    """Return the schedule's polynomial at x, a tensor or array."""
    for a, b, c in schedule:
        x = x * (a + x * x * (b + x * x * c))
    return x
