"""Rows and columns of one norm, before or after orthogonalization; whole matrices, without state.

An iteration of a few steps leaves rows and columns of a polar factor with norms that differ, most where the momentum's
differ most. `equalize` acts on what goes into the iteration, `renormalize_` on what comes out of it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..kernels.normalization import normalize

# What `equalize` and `renormalize_` take: rows, columns, or one after the other.
SIDES = ("rows", "columns", "rows_columns", "columns_rows")
EQUALIZATIONS = ("none", *SIDES)
RENORMALIZATIONS = ("none", "frobenius", *SIDES)


class Equalization(NamedTuple):
    """What is done to the lines of a matrix: `before` is one of EQUALIZATIONS, `after` one of RENORMALIZATIONS."""

    before: str = "none"
    after: str = "none"

    def __str__(self) -> str:
        before = "" if self.before == "none" else f", {self.before.replace('_', ' and ')} equalized"
        return before + ("" if self.after == "none" else f", renormalized by {self.after.replace('_', ' and ')}")


def equalize(G: Tensor, by: str, eps: float) -> Tensor:
    """Return G (B, rows, cols) with each row, or column, divided by max(its norm, eps), in the dtype of G.

    `by` is one of EQUALIZATIONS. A common factor means nothing to an iteration that divides by the matrix's norm.
    Source: MuonEq, arXiv:2603.28254, whose R, C and RC these are; its statistics are of this matrix alone here, too.
    """
    for side in _sides(by):
        G = _normalized_lines(G, side, eps)
    return G


def renormalize_(factors: Tensor, by: str) -> None:
    """Give polar factors (B, rows, cols), in place, the norm of exact ones, sqrt(min(rows, cols)).

    `by` is one of RENORMALIZATIONS: `frobenius` multiplies a matrix by one number; a side gives all its rows, or
    columns, one norm. Each element is rounded once, with two sides twice. Zeros stay zeros, and a NaN in its matrix.
    Sources: Muon+, arXiv:2602.21545, for sides; nanochat (2026) for `frobenius`.
    """
    norm = min(factors.shape[-2:]) ** 0.5
    if by == "frobenius":
        factors.copy_(normalize(factors, factors.dtype, 0.0, norm))
    for side in _sides(by):
        count = factors.size(-2 if side == "rows" else -1)
        factors.copy_(_normalized_lines(factors, side, 0.0, norm / count**0.5))


def _normalized_lines(X: Tensor, side: str, eps: float, norm: float = 1.0) -> Tensor:
    """Return X (B, rows, cols) with the lines of a side at one norm, in the dtype of X."""
    lines = X if side == "rows" else X.mT
    lines = normalize(lines.unsqueeze(-2), X.dtype, eps, norm).squeeze(-2)
    return lines if side == "rows" else lines.mT


def _sides(by: str) -> list[str]:
    return [side for side in by.split("_") if side in ("rows", "columns")]
