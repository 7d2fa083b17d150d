"""The work of an orthogonalization and of a step as formulas: FLOP, bytes, and the shortest possible time.

m is a matrix's short side, n its long one. A dense product of (m, k) with (k, n) is 2 m k n FLOP; one with a symmetric
result needs half of them. Iterations are the kernel's `Iteration`: its `method`, `windows` and `work_dtype`.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import torch


def dense_flop(m: int, n: int, steps: int) -> int:
    """Return the FLOP of the standard iteration with dense products: X Xᵀ, A², B X in each step."""
    return steps * (4 * m * m * n + 2 * m**3)


def standard_flop(m: int, n: int, steps: int) -> int:
    """Return the FLOP of the standard iteration if X Xᵀ and A² cost half of a dense product."""
    return steps * (3 * m * m * n + m**3)


def gram_flop(m: int, n: int, steps: int, windows: int) -> int:
    """Return the FLOP of the Gram iteration if every product except Q X costs half of a dense one.

    A window of w steps has X Xᵀ, Q X and 4 w - 3 products of m x m matrices that all commute.
    """
    return 4 * steps * m**3 + 3 * windows * m * m * (n - m)


def method_flop(iteration, m: int, n: int) -> int:
    """Return the least FLOP of the method of `iteration` for one matrix, whatever products it runs on."""
    steps = sum(map(len, iteration.windows))
    if iteration.method == "standard":
        return standard_flop(m, n, steps)
    return gram_flop(m, n, steps, len(iteration.windows))


def least_flop(kernel: ModuleType, device: torch.device, work_dtype: torch.dtype, size: tuple, schedule) -> int:
    """Return the FLOP of the cheapest method for one m x n matrix, of those that are safe with this schedule and dtype.

    It ignores what the kernel has chosen: a wrong choice must not lower the ideal. Squares in float32 count where
    products have them for this work dtype, and as if they took no longer; elsewhere they take several times as long.
    """
    costs = []
    for method in kernel.iteration.METHODS[1:]:  # all but auto
        with contextlib.suppress(ValueError):  # a method that is not safe
            iteration = kernel.iteration.choose_iteration(device, work_dtype, size, schedule, method)
            if iteration.chain_dtype == work_dtype or iteration.products.float32_squares:
                costs.append(method_flop(iteration, *size))
    return min(costs)


def factor_bytes(m: int, n: int, read: int, written: int) -> int:
    """Return the bytes that must move for one matrix, with `read` bytes per element, and its factor, with `written`."""
    return m * n * (read + written)


def ideal_seconds(flop: float, dense_rate: float) -> float:
    """Return the seconds of `flop` at `dense_rate`, what a large dense product reaches in FLOP a second."""
    return flop / dense_rate
