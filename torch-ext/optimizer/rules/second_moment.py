"""NorMuon: the lines of an update divided by the root mean square that they have had; whole matrices, with a state.

A polar factor's lines along its long side differ in norm. Those that were large in past steps are taken smaller, those
that were small larger, and the whole keeps its norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.normalization import frobenius_norm

# Of which lines a matrix has second moments. `long_side`: of its rows, or of its columns where these are more.
SECOND_MOMENTS = ("none", "rows", "long_side")

# Added to root mean squares, as in dion: what a line that was zero so far is divided by.
EPS = 1e-8


def balance_(updates: Tensor, moments: Tensor, beta: float) -> Tensor:
    """Balance the lines of updates (B, rows, cols) by their second moments, both in place; return the norms (B,).

        moments <- beta * moments + (1 - beta) * mean of squares of each line
        updates <- updates / (sqrt(moments) + EPS), times what gives each matrix the norm that it had

    `moments` are those of rows, (B, rows, 1), or of columns, (B, 1, cols), float32 or, for float64 updates, float64.
    Each element of both is rounded once. Nothing corrects that moments begin at zero: it is one factor for all lines,
    which the norm takes out. Zeros stay zeros, and a NaN in its matrix and its moments. Norms are at least float32,
    and of updates before these are rounded.
    Sources: NorMuon, arXiv:2510.05491, and dion/normuon.py (0333cc1), for rows; nanochat (2026) for the long side.
    """
    exact = torch.promote_types(updates.dtype, torch.float32)
    lines = updates if moments.shape == (*updates.shape[:-1], 1) else updates.mT
    norms = frobenius_norm(lines.unsqueeze(-2)).view(moments.shape)  # float64, in an order that nothing else changes
    moments.copy_(beta * moments.double() + (1 - beta) * norms.square() / lines.size(-1))
    scales = 1 / (moments.double().sqrt() + EPS)
    before, after = (frobenius_norm(each.to(exact)) for each in (norms, norms * scales))
    kept = before / after.clamp_min(torch.finfo(exact).tiny)
    updates.mul_((scales * kept).to(exact))
    return (after * kept).flatten().to(exact)
