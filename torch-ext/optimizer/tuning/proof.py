"""Proof of a symmetric product on the device that is here: what it should return, and how far roundings may take it.

Each proof is in a shape at hand, on the matrices that have broken kernels: one row that outweighs all others, whose
squares overflow where they are not scaled in time; rank one, whose sums have one sign; a NaN, which must stay in its
matrix. A matrix must get the same bits alone as in a batch, and the result be symmetric to the bit.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Callable, Optional

import torch
from torch import Tensor

from . import roundings

# One step of a published Newton-Schulz iteration has such coefficients: they cancel, so roundings show.
ALPHA, BETA = 2.0315, -4.775
# A folded scale: Gram matrices of float16 have entries up to its square, whose own squares are beyond float16.
SCALE = 64.0
# Of larger results so many rows are compared with float64, the last of them among them, where tiles are cut.
MOST_ROWS, LAST_ROWS = 64, 32

# Gram matrices for the products of squares are of so many columns at most: what matters of them is their entries.
MOST_COLUMNS = 256

# compute(A, B, D, (alpha, beta)) returns alpha A B + beta D, which is symmetric; apply(B, X, a) returns a X + B X.
Compute = Callable[[Tensor, Tensor, Optional[Tensor], tuple], Tensor]
Apply = Callable[[Tensor, Tensor, float], Tensor]


class WrongResultError(AssertionError):
    """A kernel computed something else than it promises; the message says what."""


def prove_products(compute: Compute, like: Tensor, size: tuple[int, int]) -> None:
    """Raise WrongResultError unless `compute` is right for X Xᵀ, b A + c A² and A B of m x k matrices.

    They are made on the device and in the dtype of `like`, which may be empty.
    """
    X = adversarial(like, *size)
    _prove(compute, X, X.mT, None, (1.0, 0.0))
    check_nan(compute, X)
    S = symmetric(like, size[0])
    _prove(compute, S, S, S, (ALPHA / SCALE**4, BETA / SCALE**2))
    unit = S / SCALE**2  # exact, but for numbers below the normal ones
    other = (torch.eye(size[0], device=like.device) - unit.float()).to(like.dtype)
    _prove(compute, unit, other, None, (1.0, 0.0))


def prove_launch(compute: Compute, like: Tensor, size: tuple[int, int]) -> None:
    """Do as `prove_products`, for what takes any D: a NaN in it must reach its place, and no other."""
    prove_products(compute, like, size)
    X = adversarial(like, *size)
    check_nan_in_addend(partial(compute, X, X.mT), symmetric(like, size[0]))


def prove_apply(apply: Apply, like: Tensor, size: tuple[int, int]) -> None:
    """Raise WrongResultError unless `apply` is right for m x m matrices times m x k ones."""
    X, B = adversarial(like, *size) / SCALE, symmetric(like, size[0]) / SCALE**2
    compute = lambda B, X, D, scalars: apply(B.clone(), X.clone(), scalars[1])  # noqa: E731 - it may overwrite both
    C = _alone_as_in_a_batch(compute, B, X, X, (1.0, BETA))
    rows = checked_rows(size[0])
    _check_rows(C[:, rows], *roundings.product(B[:, rows], X, X[:, rows], 1.0, BETA))
    spoiled = X.clone()
    spoiled[0, -1, -1] = math.nan
    if not torch.equal(apply(B.clone(), spoiled, BETA)[1:], C[1:]):
        raise WrongResultError("a NaN changed another matrix")


def adversarial(like: Tensor, m: int, k: int) -> Tensor:
    """Return X (3, m, k), of Frobenius norm SCALE each: normal entries, one dominant row, and rank one."""
    X = torch.stack([_normal(m, k), _normal(m, k), _normal(m, 1) @ _normal(1, k)])
    X[1, m // 2] *= 100 * math.sqrt(m)
    return (SCALE * X / torch.linalg.matrix_norm(X, keepdim=True)).to(like.device, like.dtype)


def symmetric(like: Tensor, m: int) -> Tensor:
    """Return Gram matrices (3, m, m) of such X: entries reach the square of SCALE."""
    X = adversarial(torch.empty(0, dtype=torch.float32, device=like.device), m, min(m, MOST_COLUMNS))
    S = (X @ X.mT).to(like.dtype)
    return S.tril() + S.tril(-1).mT


def check_nan(compute: Compute, X: Tensor) -> None:
    """Raise WrongResultError unless a NaN in X reaches, in X Xᵀ, its row and column, and changes no other bit."""
    clean, row = compute(X, X.mT, None, (1.0, 0.0)), X.size(1) // 2
    spoiled = X.clone()
    spoiled[0, row, X.size(2) // 2] = math.nan
    C = compute(spoiled, spoiled.mT, None, (1.0, 0.0))
    hit = torch.zeros_like(C, dtype=torch.bool)
    hit[0, row, :] = hit[0, :, row] = True
    if not torch.equal(C.isnan(), hit):
        raise WrongResultError("a NaN is elsewhere than in its row and column")
    if not torch.equal(C[~hit], clean[~hit]):
        raise WrongResultError("a NaN changed other bits than those of its row and column")


def check_nan_in_addend(compute: Callable[[Tensor, tuple], Tensor], D: Tensor) -> None:
    """Raise WrongResultError unless NaN in two mirrored places of D reach theirs in a sum with D, and no other bit."""
    clean, place = compute(D, (1.0, 1.0)), D.size(1) // 2
    spoiled = D.clone()
    spoiled[1, place, 0] = spoiled[1, 0, place] = math.nan
    C, hit = compute(spoiled, (1.0, 1.0)), spoiled.isnan()
    if not torch.equal(C.isnan(), hit) or not torch.equal(C[~hit], clean[~hit]):
        raise WrongResultError("a NaN of D is elsewhere than in its place")


def check_product(
    C: Tensor,
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    scalars: tuple = (1.0, 0.0),
    rows: Optional[Tensor] = None,
) -> None:
    """Raise WrongResultError unless C is alpha A B + beta D but for its roundings, and symmetric, bit for bit.

    Where operands only commute, both triangles are the lower one. `rows` are those that are compared, None: all.
    """
    if not torch.allclose(C, C.mT, rtol=0, atol=0, equal_nan=True):
        raise WrongResultError("not symmetric")
    rows = torch.arange(C.size(1), device=C.device) if rows is None else rows.to(C.device)
    above = rows[:, None] < torch.arange(C.size(1), device=C.device)
    for i in range(len(C)):  # one by one: float64 takes four times the memory
        d = None if D is None else D[i][rows]
        exact, allowed = roundings.product(A[i][rows], B[i], d, *map(float, scalars))
        if not torch.equal(B[i].mT, A[i]):
            mirrored = roundings.product(B[i].mT[rows], A[i].mT, d, *map(float, scalars))
            exact, allowed = (torch.where(above, other, one) for other, one in zip(mirrored, (exact, allowed)))
        _check_rows(C[i][rows], exact, allowed)


def checked_rows(m: int) -> Tensor:
    """Return which rows are compared: all of them, or the last ones, the middle one and others evenly between."""
    if m <= MOST_ROWS:
        return torch.arange(m, device="cpu")
    spread = torch.linspace(0, m - LAST_ROWS - 1, MOST_ROWS - LAST_ROWS - 1, device="cpu").long()
    middle, last = torch.tensor([m // 2], device="cpu"), torch.arange(m - LAST_ROWS, m, device="cpu")
    return torch.cat([spread, middle, last]).unique()


def _prove(compute: Compute, A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple) -> None:
    C = _alone_as_in_a_batch(compute, A, B, D, scalars)
    check_product(C, A, B, D, scalars, checked_rows(C.size(1)))


def _alone_as_in_a_batch(compute: Compute, A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple) -> Tensor:
    C = compute(A, B, D, scalars)
    one = slice(1, 2)
    if not torch.equal(compute(A[one], B[one], None if D is None else D[one], scalars), C[one]):
        raise WrongResultError("other bits alone than in a batch")
    return C


def _check_rows(C: Tensor, exact: Tensor, allowed: Tensor) -> None:
    error = (C.double() - exact).abs()
    if not (error <= allowed).all():
        raise WrongResultError(f"an error of {(error / allowed).max().item():.1e} times what roundings allow")


def _normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal entries in float32, the same on every device."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
