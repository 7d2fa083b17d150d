"""Gives rows or columns equal norms, before or after orthogonalization. Needs whole matrices, keeps no state.

After a few steps of the iteration, rows and columns of a polar factor have different norms, and most so if those of the
momentum do. Even the exact factor of a tall matrix has rows of different norms. `equalize` changes the input of the
iteration, `renormalize_` its output. Aurora runs the iteration twice, with `rescaled_by_factors` in between.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.normalization import normalize, row_norms

# The sides that `equalize` and `renormalize_` take: rows, columns, or first one and then the other.
SIDES = ("rows", "columns", "rows_columns", "columns_rows")
AURORA = "experimental_aurora"
EQUALIZATIONS = ("none", *SIDES, AURORA)
RENORMALIZATIONS = ("none", "frobenius", *SIDES)


class Equalization(NamedTuple):
    """What is done to a matrix: `before` orthogonalization, of EQUALIZATIONS, and `after` it, of RENORMALIZATIONS."""

    before: str = "none"
    after: str = "none"

    def rounds(self, rows: int, cols: int) -> int:
        """Return how many times a rows x cols matrix goes through the iteration."""
        return 2 if self.before == AURORA and rows != cols else 1

    def __str__(self) -> str:
        before = "" if self.before == "none" else f", {self.before.replace('_', ' and ')} equalized"
        if self.before == AURORA:
            before = ", lines of the long side made even (Aurora, experimental)"
        return before + ("" if self.after == "none" else f", renormalized by {self.after.replace('_', ' and ')}")


def equalize(G: Tensor, by: str, eps: float) -> Tensor:
    """Return G (B, rows, cols) with each row, or column, divided by max(its norm, eps), in the dtype of G.

    `by` is one of EQUALIZATIONS. All norms become 1; a common factor would not matter, because the iteration divides by
    the matrix's norm.
    Source: MuonEq, arXiv:2603.28254, whose R, C and RC these are; there, too, each matrix uses only its own norms.
    """
    sides = _long_side(G) if by == AURORA else _sides(by)
    equal = torch.empty_like(G) if sides else G
    for side in sides:
        _normalize_lines_(equal, G, side, eps)
        G = equal
    return equal


def rescaled_by_factors(G: Tensor, factors: Tensor) -> Tensor:
    """Return G (B, rows, cols) with the lines of its long side (a tall G's rows) rescaled, in G's dtype.

    `factors` are the polar factors of G. With equal norms, each of their lines would have norm sqrt(short / long). A
    line of G is multiplied by that norm divided by its actual one: if its line in the factor has half the norm, it is
    doubled. The factors of the result have lines of more equal norms. Square matrices do not change.
    Source: Aurora, arXiv:2606.27715, with one refinement, undamped.
    """
    for side in _long_side(G):
        lines = factors if side == "rows" else factors.mT
        norms = row_norms(lines)  # (B, long, 1)
        even = (lines.size(-1) / lines.size(-2)) ** 0.5
        exact = torch.promote_types(G.dtype, torch.float32)
        # A line that is zero in the factor is zero in G, too, or so small that rounding has lost it: it stays as it is.
        scale = torch.where(norms == 0, 1.0, even / norms).clamp_max(torch.finfo(exact).max).to(exact)
        G = (G * (scale if side == "rows" else scale.mT)).to(G.dtype)
    return G


def renormalize_(factors: Tensor, by: str) -> None:
    """Give polar factors (B, rows, cols), in place, the Frobenius norm of exact ones, sqrt(min(rows, cols)).

    `by` is one of RENORMALIZATIONS. `frobenius` multiplies each matrix by one number; a side gives all its rows, or
    columns, the same norm. Each element is rounded once, with two sides twice. Zeros stay zeros. A NaN stays in its own
    matrix.
    Sources: Muon+, arXiv:2602.21545, for sides; nanochat (2026) for `frobenius`.
    """
    norm = min(factors.shape[-2:]) ** 0.5
    if by == "frobenius":
        normalize(factors, factors.dtype, 0.0, norm, out=factors)
    for side in _sides(by):
        count = factors.size(-2 if side == "rows" else -1)
        _normalize_lines_(factors, factors, side, 0.0, norm / count**0.5)


def _normalize_lines_(out: Tensor, X: Tensor, side: str, eps: float, norm: float = 1.0) -> None:
    """Write X (B, rows, cols) with all rows, or all columns, scaled to `norm` to `out`, which may be X."""
    lines, results = (X, out) if side == "rows" else (X.mT, out.mT)
    normalize(lines, X.dtype, eps, norm, row_norms(lines), results)


def _long_side(G: Tensor) -> list[str]:
    rows, cols = G.shape[-2:]
    return [] if rows == cols else ["rows" if rows > cols else "columns"]


def _sides(by: str) -> list[str]:
    return [side for side in by.split("_") if side in ("rows", "columns")]
