"""Proof of what else a step does: a X + B X, and all steps in one call."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import torch
from torch import Tensor

from . import roundings
from .proof import (
    BETA,
    PLAIN,
    SCALE,
    WrongResultError,
    adversarial,
    alone_as_in_a_batch,
    check_entries,
    check_sums,
    checked_rows,
    symmetric,
)

# apply(B, X, a) returns a X + B X.
Apply = Callable[[Tensor, Tensor, float], Tensor]


def prove_apply(apply: Apply, like: Tensor, size: tuple[int, int]) -> None:
    """Raise WrongResultError unless `apply` is right for m x m matrices times m x k matrices."""
    X, B = adversarial(like, *size) / SCALE, symmetric(like, size[0]) / SCALE**2
    compute = lambda B, X, D, scalars: apply(B, X.clone(), scalars[1])  # noqa: E731 - it may overwrite X
    C = alone_as_in_a_batch(compute, B, X, X, (1.0, BETA, 0.0))
    _check_applied(C, B, X, BETA)
    _check_applied(compute(B[:1], X[:1], None, PLAIN), B[:1], X[:1], 0.0)  # other code may run if nothing is added
    X[0, -1, -1] = math.nan
    if not torch.equal(apply(B[:2], X[:2], BETA)[1], C[1]):
        raise WrongResultError("a NaN changed another matrix")


def prove_iteration(
    together: Callable[[Tensor], Tensor], step_by_step: Callable[[Tensor], Tensor], like: Tensor, shape: Sequence[int]
) -> None:
    """Raise WrongResultError unless `together`, all steps in one call, gives wide matrices the bits of `step_by_step`.

    Both may overwrite their argument. `shape` (count, m, k) has as many matrices as all threads need for their work.
    """
    count, m, k = shape
    X = adversarial(like, m, k) / SCALE
    X = X.repeat(-(-count // len(X)), 1, 1)[:count]
    results = step_by_step(X.clone())
    if not torch.equal(together(X.clone()), results):
        raise WrongResultError("other bits in one call than step by step")
    X[0, -1, -1] = math.nan  # its thread may use the same memory for the next matrix
    if count > 1 and not torch.equal(together(X)[1:], results[1:]):
        raise WrongResultError("a NaN changed another matrix in one call")


def _check_applied(C: Tensor, B: Tensor, X: Tensor, a: float) -> None:
    rows = checked_rows(X.size(1))
    for b, x, c in zip(B, X, C):
        check_entries(c[rows], *roundings.product(b[rows], x, 1.0, (a, x[rows])))
    check_sums(C, B, X, X, (1.0, a, 0.0), is_symmetric=False)
