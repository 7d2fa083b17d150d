"""The steps of a Newton-Schulz iteration: the standard one, and the Gram iteration, which works on small matrices."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

from ..schedules import Schedule
from .product_table import Products


def places_in_turn(out: Optional[Tensor], steps: int, products: Products) -> list[Optional[Tensor]]:
    """Return where to write wide X (..., m, n), and what each of `steps` products makes of it; the last is `out`.

    None stands for new memory. Without an `out` all of it is new: autograd, torch.func and torch.compile need that.
    Batched products write to `out` and to one more tensor in turn. Others get `out` at the end only: it may begin
    inside a cache line, and torch's products of a single matrix must not read from there.
    """
    if out is None or products.in_place:
        return [out] * (steps + 1)
    if not products.batched:
        return [None] * steps + [out]
    both = out, torch.empty_like(out)
    return [both[(steps - step) % 2] for step in range(steps + 1)]


def newton_schulz(
    X: Tensor,
    schedule: Schedule,
    products: Products,
    places: Optional[Sequence[Optional[Tensor]]] = None,
    squares: Optional[Sequence[Tensor]] = None,
) -> Tensor:
    """Return p(X) for wide X (..., m, n) of spectral norm at most 1: every step is a X + b (X Xᵀ) X + c (X Xᵀ)² X.

    Each step writes to its place (`places_in_turn`). If `products` work in place, X is overwritten. `squares`, two
    tensors (..., m, m), is memory for the two m x m matrices of a step, if it is given.
    """
    if products.newton_schulz is not None:
        return products.newton_schulz(X, schedule, squares)
    first, second = squares or (None, None)
    for (a, b, c), place in zip(schedule, places or [None] * len(schedule)):
        A = products.gram(X, first)  # X Xᵀ
        diagonal = a if products.a_on_diagonal else 0.0
        B = products.gram_affine(A, b, c, diagonal, second)  # b A + c A², and a I where that replaces a X
        X = products.affine(B, X, a - diagonal, place)  # a X + B X
    return X


def gram_newton_schulz(
    X: Tensor,
    windows: Sequence[Schedule],
    products: Products,
    chain_dtype: torch.dtype,
    places: Optional[Sequence[Optional[Tensor]]] = None,
    squares: Optional[Sequence[Tensor]] = None,
) -> Tensor:
    """Return what `newton_schulz` returns, computed from R = X Xᵀ (..., m, m) in `chain_dtype` within each window.

    A step h(R) = a I + b R + c R² turns X into h(R) X, and R into h(R) R h(R). X itself is multiplied only at the end
    of a window, by the product Q of the window's steps. All of these are polynomials of one R, so they commute.
    Each window writes to its place (`places_in_turn`). `squares`, four tensors (..., m, m), is memory for
    `products.gram_newton_schulz`, if it is given and they have that.
    Source: Dao-AILab, Gram Newton-Schulz, https://github.com/Dao-AILab/gram-newton-schulz.
    """
    if products.gram_newton_schulz is not None:
        return products.gram_newton_schulz(X, windows, squares)
    for window, place in zip(windows, places or [None] * len(windows)):
        # No variable keeps an m x m matrix, so its memory is free as soon as the next step has read it.
        X = apply_window(
            window_product(gram_matrix(X, products, chain_dtype), window, products), X, window, products, place
        )
    return X


def gram_matrix(X: Tensor, products: Products, chain_dtype: torch.dtype, out: Optional[Tensor] = None) -> Tensor:
    """Return X Xᵀ (..., m, m) of X (..., m, n) in `chain_dtype`, written to `out` if that is given."""
    if products.float32_squares and X.dtype != chain_dtype:
        out = X.new_empty(*X.shape[:-1], X.size(-2), dtype=chain_dtype) if out is None else out
        return products.gram(X, out)
    return products.gram(X.to(chain_dtype), out)


def apply_window(Q: Tensor, X: Tensor, window: Schedule, products: Products, out: Optional[Tensor] = None) -> Tensor:
    """Return what a window's steps make of X (..., m, n); Q (..., m, m) is their `window_product`."""
    return products.affine(Q.to(X.dtype), X, _addend(window, products), out)


def _addend(window: Schedule, products: Products) -> float:
    """Return beta of Q X + beta X, which a window's steps make of X; Q is their `window_product`.

    A single step adds a X, as the standard iteration does: a I + b R + c R² would be rounded to X's dtype as a whole.
    """
    return window[0][0] if len(window) == 1 and not products.a_on_diagonal else 0.0


def window_product(R: Tensor, window: Schedule, products: Products, out: Optional[Tensor] = None) -> Tensor:
    """Return Q (..., m, m) for the Gram matrix R = X Xᵀ at a window's start, written to `out` if that is given.

    Q is the product of the window's steps, less the `_addend`.
    """
    Q = None
    for step, (a, b, c) in enumerate(window, 1):
        place = out if step == len(window) else None
        diagonal = a - _addend(window, products)
        if Q is None:
            H = Q = products.gram_affine(R, b, c, diagonal, place)  # a I + b R + c R²
        else:
            H = products.gram_affine(R, b, c, diagonal)
            Q = products.commuting(Q, H, place)
        if step < len(window):
            R = products.conjugated(H, R)
    return Q
