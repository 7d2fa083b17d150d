"""NorMuon: rows or columns of an update divided by a running average of their size. Needs whole matrices and a state.

Along its long side a polar factor's lines (rows of a tall matrix, columns of a wide one) differ in norm. Lines that
were large in past steps are made smaller, lines that were small larger, and the norm of the whole matrix stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.normalization import frobenius_norm, normalize, row_norms

# The lines that have second moments. `long_side`: rows, or columns if there are more columns than rows.
SECOND_MOMENTS = ("none", "rows", "long_side")

# Added to root mean squares, as in dion, so that a line that has always been zero can be divided.
EPS = 1e-8


def balance_(updates: Tensor, moments: Tensor, beta: float) -> None:
    """Balance the lines of updates (B, rows, cols) by their second moments; both change in place.

        moments <- beta * moments + (1 - beta) * mean of squares of each line
        updates <- updates / (sqrt(moments) + EPS), times the factor that restores each matrix's norm

    `moments` are (B, rows, 1) for rows or (B, 1, cols) for columns, float32, or float64 for float64 updates. Each
    element of both is rounded once. Moments begin at zero without a correction for that: it would be one factor for all
    lines, and restoring the norm cancels it. Zeros stay zeros. A NaN stays in its own matrix and moments.
    Sources: NorMuon, arXiv:2510.05491, and dion/normuon.py (0333cc1), for rows; nanochat (2026) for the long side.
    """
    exact = torch.promote_types(updates.dtype, torch.float32)
    lines = updates if moments.shape == (*updates.shape[:-1], 1) else updates.mT
    norms = row_norms(lines)
    averages = moments.view(norms.shape)
    averages.copy_(beta * averages.to(norms.dtype) + (1 - beta) * norms.square() / lines.size(-1))
    roots = averages.to(norms.dtype).sqrt() + EPS
    before, after = (frobenius_norm(each.to(exact)) for each in (norms, norms / roots))
    # Zeros, whose norm is 0 before, are divided by infinity.
    divisors = roots / before * after.clamp_min(torch.finfo(exact).tiny)
    normalize(lines, updates.dtype, 0.0, norm=divisors, out=lines)
