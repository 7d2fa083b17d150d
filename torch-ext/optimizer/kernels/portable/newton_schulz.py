"""`newton_schulz_` and `gram_newton_schulz_`: all products of an iteration on a CPU, in one call.

    newton_schulz_(X, A, B, coefficients, alone, instructions)

        A = X Xᵀ,  B = c A A + b A,  X = B X + a X        for each a, b, c of the coefficients

    gram_newton_schulz_(X, R, H, Q, T, coefficients, windows, alone, instructions, square_instructions)

        R = X Xᵀ                                          for each window, then
        H = c R R + b R + a I,  Q = Q H,  R = H R H       for each a, b, c of its steps, then
        X = Q X

`newton_schulz_` takes X (b, m, n) with contiguous rows, and room for A and B: two contiguous tensors (rooms, m, m), at
least one room. All are float32 or all bfloat16, and share no memory. `coefficients` are three numbers for each step. X
gets, bit for bit, what three calls of `gemm_` for each step would make of it, the first two of them `symmetric`, with
the same `instructions`. What is left in A and B is not defined.

`gram_newton_schulz_` takes the same X, and four matrices like A and B, but in float32, whatever X is. `windows` are the
numbers of steps in each window, at least one. At a window's first step Q is H, and at its last one R is not
computed. A window of one step leaves a I out of H, and computes X = Q X + a X.

- Each product is that of a call of `gemm_`: X Xᵀ and Q X with `instructions`, Q rounded to X's dtype before; the others
  are `symmetric` and with `square_instructions`, which are instructions for float32. H R H is H T with T = R H.
- a is added to the diagonal in float32, after H is rounded to it. What is left in the four matrices is not defined.

In both, with `alone` each thread takes one matrix after another through all steps, and waits for no other thread:
faster if a core's cache holds a matrix. That takes as many rooms as threads. Matrices that are left over, because there
are fewer than threads, are shared by all threads, product by product. So is every matrix without `alone`, or if there
are fewer rooms than threads. The functions here take one matrix after another, whatever `alone` is.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Mapping, Sequence

import torch
from torch import Tensor

from .gemm import INSTRUCTIONS, check_batch, check_instructions, check_rows, gemm_
from .memory import Memory
from .refusals import name_of, shown

SCHEMA = "(Tensor(a!) X, Tensor(b!) A, Tensor(c!) B, float[] coefficients, bool alone, str instructions) -> ()"
GRAM_SCHEMA = (
    "(Tensor(a!) X, Tensor(b!) R, Tensor(c!) H, Tensor(d!) Q, Tensor(e!) T, float[] coefficients, int[] windows, "
    "bool alone, str instructions, str square_instructions) -> ()"
)


def newton_schulz_(
    X: Tensor, A: Tensor, B: Tensor, coefficients: Sequence[float], alone: bool, instructions: str
) -> None:
    """Replace each X by a X + (b A + c A²) X with A = X Xᵀ, step by step, one matrix after another."""
    _check(X, {"A": A, "B": B}, X.dtype, "as X is")
    steps = _steps(coefficients)
    check_instructions(instructions)
    for i in range(len(X)):
        x, square, polynomial = X[i : i + 1], A[:1], B[:1]
        for a, b, c in steps:
            gemm_(square, x, x.mT, None, 1.0, 0.0, True, INSTRUCTIONS)
            gemm_(polynomial, square, square, square, c, b, True, INSTRUCTIONS)
            gemm_(x, polynomial, x, x if a else None, 1.0, a, False, INSTRUCTIONS)


def gram_newton_schulz_(
    X: Tensor,
    R: Tensor,
    H: Tensor,
    Q: Tensor,
    T: Tensor,
    coefficients: Sequence[float],
    windows: Sequence[int],
    alone: bool,
    instructions: str,
    square_instructions: str,
) -> None:
    """Replace each X by the product of all steps with it, from R = X Xᵀ in each window, one matrix after another."""
    _check(X, {"R": R, "H": H, "Q": Q, "T": T}, torch.float32, "whatever X is")
    steps = _steps(coefficients)
    _check_windows(windows, len(steps))
    check_instructions(instructions)
    check_instructions(square_instructions)
    for i in range(len(X)):
        x, ends = X[i : i + 1], list(accumulate(windows))
        for start, end in zip([0, *ends], ends):
            product = _window_product(x, [square[:1] for square in (R, H, Q, T)], steps[start:end])
            a = steps[start][0] if end == start + 1 else 0.0  # a single step adds a X
            gemm_(x, product.to(x.dtype), x, x if a else None, 1.0, a, False, INSTRUCTIONS)


def _window_product(x: Tensor, squares: Sequence[Tensor], steps: Sequence[Sequence[float]]) -> Tensor:
    """Return Q of one matrix (1, m, n), in one of `squares`, which are overwritten."""
    R, H, Q, T = squares
    gemm_(R, x, x.mT, None, 1.0, 0.0, True, INSTRUCTIONS)
    for step, (a, b, c) in enumerate(steps, 1):
        polynomial = Q if step == 1 else H
        gemm_(polynomial, R, R, R, c, b, True, INSTRUCTIONS)
        if a and len(steps) > 1:
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        if step > 1:
            gemm_(T, Q, polynomial, None, 1.0, 0.0, True, INSTRUCTIONS)
            Q, T = T, Q
        if step < len(steps):
            gemm_(T, R, polynomial, None, 1.0, 0.0, True, INSTRUCTIONS)
            gemm_(R, polynomial, T, None, 1.0, 0.0, True, INSTRUCTIONS)
    return Q


def _steps(coefficients: Sequence[float]) -> list[Sequence[float]]:
    """Return the three coefficients of each step."""
    if len(coefficients) % 3:
        raise RuntimeError(f"coefficients must be three for each step, got {len(coefficients)}")
    return [coefficients[first : first + 3] for first in range(0, len(coefficients), 3)]


def _check_windows(windows: Sequence[int], steps: int) -> None:
    if any(window < 1 for window in windows):
        raise RuntimeError(f"windows must have at least one step each, got {shown(windows)}")
    if sum(windows) != steps:
        raise RuntimeError(f"windows must have {steps} steps in all, got {shown(windows)}")


def _check(X: Tensor, squares: Mapping[str, Tensor], dtype: torch.dtype, like: str) -> None:
    first, A = next(iter(squares.items()))
    if X.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(f"X must be float32 or bfloat16, got {name_of(X.dtype)}")
    if X.ndim != 3 or A.ndim != 3:
        shapes = f"{shown(X.shape)} and {shown(A.shape)}"
        raise RuntimeError(f"X and {first} must be (batch, m, n) and (rooms, m, m), got {shapes}")
    (count, m, n), rooms = X.shape, len(A)
    check_batch("X", X, (count, m, n), X.dtype)
    check_rows("X", X)
    if rooms == 0 < count:
        raise RuntimeError(f"{first} must have room for a matrix, got {shown(A.shape)}")
    memory = Memory()
    memory.write("X", X)
    for name, t in squares.items():
        check_batch(name, t, (rooms, m, m), dtype, like)
        if not t.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {shown(t.stride())}")
        memory.write(name, t)
    memory.check()
