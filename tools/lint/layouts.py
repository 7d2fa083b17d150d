"""How the operands of a symmetric product may lie in memory: what changes the code that is compiled for them."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor


def new_of(dtype: str) -> Callable[..., Tensor]:
    """Return what makes tensors of a dtype, without contents. Nothing is written to them, so they take no memory."""
    return lambda *shape: torch.empty(*shape, dtype=getattr(torch, dtype))


def wide(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    X = new(2, m, k)
    return X, X.mT, None, new(2, m, m)


def wide_with_addend(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    """No step adds a matrix to X Xᵀ, but the proof of a configuration does."""
    X = new(2, m, k)
    return X, X.mT, new(2, m, m), new(2, m, m)


def tall(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    X = new(2, k, m).mT
    return X, X.mT, None, new(2, m, m)


def square(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    return new(2, m, m), new(2, m, m), new(2, m, m), new(2, m, m)


def commuting(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    return new(2, m, m), new(2, m, m), None, new(2, m, m)


def repeated(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    """One matrix for the whole batch. No tensor descriptor can describe that, so every GPU uses pointers."""
    X = new(m, k).expand(2, m, k)
    return X, X.mT, None, new(2, m, m)


def repeated_square(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    R = new(m, m).expand(2, m, m)
    return R, R, R, new(2, m, m)


def shifted_addend(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    return new(2, m, m), new(2, m, m), new(2, m, m + 1)[..., 1:], new(2, m, m)


def transposed_result(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    return new(2, m, m), new(2, m, m), new(2, m, m).mT, new(2, m, m).mT


def spread(new: Callable[..., Tensor], m: int, k: int) -> tuple:
    """No inner stride is 1, as in a slice."""
    X = new(2, m, 16 * k)[..., ::16]
    return X, X.mT, None, new(2, m, 16 * m)[..., ::16]


SQUARE = {f.__name__: f for f in (square, commuting, repeated_square, shifted_addend, transposed_result)}
LAYOUTS = {f.__name__: f for f in (wide, wide_with_addend, tall, repeated, spread)} | SQUARE
