"""`newton_schulz_` by the portable `gemm_`; its contract is in `kernels/native.py`."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from .gemm import INSTRUCTIONS, check_batch, check_instructions, check_rows, gemm_
from .memory import Memory
from .refusals import listed, name_of

SCHEMA = "(Tensor(a!) X, Tensor(b!) A, Tensor(c!) B, float[] coefficients, bool alone, str instructions) -> ()"


def newton_schulz_(
    X: Tensor, A: Tensor, B: Tensor, coefficients: Sequence[float], alone: bool, instructions: str
) -> None:
    """Replace each X by a X + (b A + c A²) X with A = X Xᵀ, step by step, one matrix after another."""
    _check(X, A, B, coefficients)
    check_instructions(instructions)
    for i in range(len(X)):
        x, square, polynomial = X[i : i + 1], A[:1], B[:1]
        for first in range(0, len(coefficients), 3):
            a, b, c = coefficients[first : first + 3]
            gemm_(square, x, x.mT, None, 1.0, 0.0, True, INSTRUCTIONS)
            gemm_(polynomial, square, square, square, c, b, True, INSTRUCTIONS)
            gemm_(x, polynomial, x, x if a else None, 1.0, a, False, INSTRUCTIONS)


def _check(X: Tensor, A: Tensor, B: Tensor, coefficients: Sequence[float]) -> None:
    if X.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(f"X must be float32 or bfloat16, got {name_of(X.dtype)}")
    if X.ndim != 3 or A.ndim != 3:
        shapes = f"{listed(X.shape)} and {listed(A.shape)}"
        raise RuntimeError(f"X and A must be (batch, m, n) and (rooms, m, m), got {shapes}")
    (count, m, n), rooms = X.shape, len(A)
    check_batch("X", X, (count, m, n), X.dtype, "X")
    check_rows("X", X)
    if rooms == 0 < count:
        raise RuntimeError(f"A must have room for a matrix, got {listed(A.shape)}")
    squares = ("A", A), ("B", B)
    for name, t in squares:
        check_batch(name, t, (rooms, m, m), X.dtype, "X")
    for name, t in squares:
        if not t.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {listed(t.stride())}")
    memory = Memory()
    for name, t in (("X", X), *squares):
        memory.write(name, t)
    memory.check()
    if len(coefficients) % 3:
        raise RuntimeError(f"coefficients must be three for each step, got {len(coefficients)}")
