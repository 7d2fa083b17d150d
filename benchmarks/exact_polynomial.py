"""The exact result of an iteration in float64, written independently of the kernel, and a result's distance from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Schedule = Sequence[tuple[float, float, float]]


def exact_factor(G: Tensor, schedule: Schedule) -> Tensor:
    """Return the schedule's polynomial of G / |G|_F for one matrix G (m, n), in float64."""
    X = G.double()
    X = X.mT if X.size(0) > X.size(1) else X
    X = X / torch.linalg.matrix_norm(X)
    for a, b, c in schedule:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.mT if G.size(0) > G.size(1) else X


def errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the relative error in the Frobenius norm and the largest error of an entry."""
    difference = result.double() - exact
    relative = torch.linalg.matrix_norm(difference) / torch.linalg.matrix_norm(exact)
    return relative.item(), difference.abs().max().item()
