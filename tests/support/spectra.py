"""Matrices with chosen singular values: the only inputs on which an orthogonalization can be judged."""

import math

import torch

SPECTRA = {
    "flat": lambda k: torch.ones(k, dtype=torch.float64),
    "power_law": lambda k: torch.arange(1, k + 1, dtype=torch.float64).pow(-1.0),
    "log_spaced": lambda k: torch.logspace(0, -3, k, dtype=torch.float64),
    "condition_1e6": lambda k: torch.logspace(0, -6, k, dtype=torch.float64),
    "clustered": lambda k: torch.where(torch.arange(k) % 2 == 0, 1.0, 1e-2).double(),
    "rank_deficient": lambda k: (torch.arange(k) < (k + 1) // 2).double(),
    "one_huge": lambda k: one_large(k, 1e-3),
    "rank_one": lambda k: one_large(k, 0.0),
    "gaussian": lambda k: torch.linalg.svdvals(_normal(k, k, torch.Generator().manual_seed(0))),
}


def one_large(k, rest):
    """Return one singular value of 1 and k - 1 of `rest`."""
    return torch.where(torch.arange(k) == 0, 1.0, rest).double()


def singular_vectors(m, n, seed):
    """Return orthonormal float64 U (m, k) and V (n, k), k = min(m, n)."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left = torch.linalg.qr(_normal(m, k, generator)).Q
    return left, torch.linalg.qr(_normal(n, k, generator)).Q


def dominant_row(m, n, seed):
    """Return a float64 matrix (m, n) of which one row is all but a thousandth: left singular vectors are not spread.

    Its Gram matrix has one entry that is about all of its norm, the largest there is.
    """
    generator = torch.Generator().manual_seed(seed)
    G = 1e-3 * _normal(m, n, generator) / math.sqrt(m * n)
    G[m // 2] = _normal(1, n, generator)[0] / math.sqrt(n)
    return G


def rank_one(m, n, seed):
    """Return a float64 matrix (m, n), the outer product of normal entries of four bits: bfloat16 holds it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.outer(*(_of_four_bits(_normal(1, size, generator)[0]) for size in (m, n)))


def with_spectrum(sigma, m, n, seed):
    """Return a float64 matrix (m, n) with the singular values `sigma`, min(m, n) of them."""
    left, right = singular_vectors(m, n, seed)
    return left @ torch.diag(sigma) @ right.mT


def composed(schedule, x):
    """Return the schedule's polynomial at x, a tensor or array."""
    for a, b, c in schedule:
        x = x * (a + x * x * (b + x * x * c))
    return x


def _normal(rows, cols, generator):
    return torch.randn(rows, cols, dtype=torch.float64, generator=generator)


def _of_four_bits(x):
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((16 * mantissa).round() / 16, exponent)
