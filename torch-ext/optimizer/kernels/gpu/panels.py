"""Steps of an iteration on one small matrix inside one program, for Triton kernels: products by panels of columns.

A matrix is a tuple (pointer, row stride, column stride). G may have any strides. All other matrices are parts of the
program's scratch memory: they have SIDE rows or columns, are padded with zeros, and their rows have a length that is a
multiple of WIDTH and DEPTH. Each function ends with a barrier if it writes, so all threads see the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# A norm below float32's smallest normal number has no digits left that could be scaled up.
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def pointers(matrix, rows, columns):
    """Pointers to rows and columns of a matrix (pointer, row stride, column stride)."""
    return matrix[0] + rows[:, None] * matrix[1] + columns[None, :] * matrix[2]


@triton.jit
def panel(A, B, first, depth, SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Return columns `first` to `first` + WIDTH of A B in float32; A (SIDE, depth), B (depth, ...)."""
    inner = tl.arange(0, DEPTH)
    a_places = pointers(A, tl.arange(0, SIDE), inner)
    b_places = pointers(B, inner, first + tl.arange(0, WIDTH))
    sums = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    for _ in range(0, depth, DEPTH):
        sums = tl.dot(tl.load(a_places), tl.load(b_places), sums, input_precision="ieee")
        a_places += DEPTH * A[2]
        b_places += DEPTH * B[1]
    return sums


@triton.jit
def store(sums, matrix, first, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Round `sums` and write them to the columns `first` to `first` + WIDTH of a matrix with SIDE rows. No barrier."""
    places = pointers(matrix, tl.arange(0, SIDE), first + tl.arange(0, WIDTH))
    tl.store(places, sums.to(matrix[0].dtype.element_ty))


@triton.jit
def applied(A, B, beta, first, SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Return WIDTH columns of A B + beta B in float32, A (SIDE, SIDE); beta None means no addend."""
    sums = panel(A, B, first, SIDE, SIDE, WIDTH, DEPTH)
    if beta is not None:
        places = pointers(B, tl.arange(0, SIDE), first + tl.arange(0, WIDTH))
        sums += beta * tl.load(places).to(tl.float32)
    return sums


@triton.jit
def multiply(A, B, beta, width, SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """B (SIDE, width) becomes A B + beta B, in place: a panel is written once all threads have read it."""
    for first in range(0, width, WIDTH):
        sums = applied(A, B, beta, first, SIDE, WIDTH, DEPTH)
        tl.debug_barrier()
        store(sums, B, first, SIDE, WIDTH)
    tl.debug_barrier()


@triton.jit
def gram(X, R, width, SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """R (SIDE, SIDE) becomes X Xᵀ."""
    for first in range(0, SIDE, WIDTH):
        store(panel(X, (X[0], X[2], X[1]), first, width, SIDE, WIDTH, DEPTH), R, first, SIDE, WIDTH)
    tl.debug_barrier()


@triton.jit
def polynomial(R, H, abc, m, SIDE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """H becomes a I + b R + c R R, with the identity in its first m rows."""
    rows = tl.arange(0, SIDE)
    for first in range(0, SIDE, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        sums = abc[2] * panel(R, R, first, SIDE, SIDE, WIDTH, DEPTH)
        sums += abc[1] * tl.load(pointers(R, rows, columns)).to(tl.float32)
        sums += tl.where((rows[:, None] == columns[None, :]) & (rows < m)[:, None], abc[0], 0.0)
        store(sums, H, first, SIDE, WIDTH)
    tl.debug_barrier()


@triton.jit
def load(G, first, m, n, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH columns of G (m, n) in float32, zero outside of G."""
    rows, columns = tl.arange(0, SIDE), first + tl.arange(0, WIDTH)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    return tl.load(pointers(G, rows, columns), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def normalize(G, X, m, n, width, scale, eps, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """X (SIDE, width) becomes scale G / max(|G|_F, eps), padded by zeros.

    Before its squares are summed, G is multiplied by the power of two that brings its largest entry near 1. The maximum
    ignores NaN, the sum does not: a NaN in G makes X NaN.
    """
    peak = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    for first in range(0, n, WIDTH):
        peak = tl.maximum(peak, tl.abs(load(G, first, m, n, SIDE, WIDTH)))
    exponent = tl.max(tl.max(peak, 1), 0).to(tl.int32, bitcast=True) & (255 << 23)
    unit = ((254 << 23) - tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)).to(tl.float32, bitcast=True)
    squares = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    for first in range(0, n, WIDTH):
        g = unit * load(G, first, m, n, SIDE, WIDTH)
        squares += g * g
    # Both round correctly. With `sqrt` and `/`, which do not, float32 would be less exact than its proof allows.
    norm = tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0))
    least = tl.maximum(eps, TINY) * unit
    factor = tl.div_rn(scale, tl.where(norm < least, least, norm))
    for first in range(0, width, WIDTH):
        store(unit * load(G, first, m, n, SIDE, WIDTH) * factor, X, first, SIDE, WIDTH)
    tl.debug_barrier()
