"""The windows of an iteration on one small matrix inside one program, for Triton kernels: chains of square matrices.

R is X Xᵀ at the beginning of a window. Every step (a, b, c) of the window computes

    H = a I + b R + c R R, and then
    Q = H at the window's first step, H Q at the others;  R = H (H R), or X = Q X where the window ends

In a window of one step X = a X + (b R + c R R) X, where a X is added in float32, without a rounding of its own.

Each function applies all windows to X in place, except for the last product: it returns the last Q and a `beta`, and
the caller computes Q X + beta X.

The squares live in scratch memory, where a panel of their columns is computed at a time, or on the chip: whole, in
registers, and in shared memory while products read them. On the chip no square passes through a cache, but squares must
fit there. In scratch H multiplies from the left and in place, which works because a panel of columns of the result
depends only on the same columns of the operand.

Source: Dao-AILab, https://github.com/Dao-AILab/gram-newton-schulz.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .panels import gram, multiply, panel, pointers, polynomial, store


@triton.jit
def chain_in_scratch(
    X, squares, coefficients, ends, m, width, SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr
):
    """Compute all windows with the squares in scratch memory: `squares` has room for three. Q is a matrix there."""
    SQUARE: tl.constexpr = SIDE * SIDE
    STEPS: tl.constexpr = len(coefficients) // 3
    R = squares, SIDE, 1
    Q = squares + SQUARE, SIDE, 1
    opens, beta = 1, 0.0
    for step in range(STEPS):
        a, b, c = _abc(coefficients, step)
        closes = (ends >> step) & 1
        alone = opens * closes
        H = squares + SQUARE * (2 - opens), SIDE, 1  # the first H of a window is its Q
        if opens == 1:
            gram(X, R, width, SIDE, WIDTH, DEPTH)
        polynomial(R, H, (tl.where(alone == 1, 0.0, a), b, c), m, SIDE, WIDTH, DEPTH)
        if opens == 0:
            multiply(H, Q, None, SIDE, SIDE, WIDTH, DEPTH)
        beta = tl.where(alone == 1, a, 0.0)
        if closes == 0:
            for _ in range(2):
                multiply(H, R, None, SIDE, SIDE, WIDTH, DEPTH)
        elif step + 1 < STEPS:
            multiply(Q, X, beta, width, SIDE, WIDTH, DEPTH)
        opens = closes
    return Q, beta


@triton.jit
def chain_on_chip(X, coefficients, ends, m, width, SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Compute all windows with squares on the chip. Q is a block (SIDE, SIDE) of values in the dtype of X."""
    STEPS: tl.constexpr = len(coefficients) // 3
    dtype: tl.constexpr = X[0].dtype.element_ty
    rows = tl.arange(0, SIDE)
    diagonal = (rows[:, None] == rows[None, :]) & (rows < m)[:, None]
    R = tl.zeros((SIDE, SIDE), dtype=dtype)
    Q = R
    opens, beta = 1, 0.0
    for step in range(STEPS):
        a, b, c = _abc(coefficients, step)
        closes = (ends >> step) & 1
        alone = opens * closes
        if opens == 1:
            R = panel(X, (X[0], X[2], X[1]), 0, width, SIDE, SIDE, DEPTH).to(dtype)
        H = c * _dot(R, R) + b * R.to(tl.float32)
        H = (H + tl.where(diagonal, tl.where(alone == 1, 0.0, a), 0.0)).to(dtype)
        if opens == 1:
            Q = H
        else:
            Q = _dot(H, Q).to(dtype)
        beta = tl.where(alone == 1, a, 0.0)
        if closes == 0:
            R = _dot(H, _dot(H, R).to(dtype)).to(dtype)
        elif step + 1 < STEPS:
            for first in range(0, width, WIDTH):
                sums = applied_on_chip(Q, X, beta, first, SIDE, WIDTH)
                tl.debug_barrier()
                store(sums, X, first, SIDE, WIDTH)
            tl.debug_barrier()
        opens = closes
    return Q, beta


@triton.jit
def applied_on_chip(Q, X, beta, first, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH columns of Q X + beta X in float32; Q is a block of values."""
    x = tl.load(pointers(X, tl.arange(0, SIDE), first + tl.arange(0, WIDTH)))
    return _dot(Q, x) + beta * x.to(tl.float32)


@triton.jit
def _dot(A, B):
    return tl.dot(A, B, input_precision="ieee")


@triton.jit
def _abc(coefficients, step):
    """Return the three coefficients of a step whose number is known only when the kernel runs."""
    a, b, c = coefficients[0], coefficients[1], coefficients[2]
    for other in tl.static_range(1, len(coefficients) // 3):
        a = tl.where(step == other, coefficients[3 * other], a)
        b = tl.where(step == other, coefficients[3 * other + 1], b)
        c = tl.where(step == other, coefficients[3 * other + 2], c)
    return a, b, c
