"""The Gram iteration of matrices of several lengths on a GPU, with one chain of m x m products for all of them.

The product Q of a window's steps is a polynomial of R = X Xᵀ (m, m), so it does not depend on how long X is. Matrices
with one short side put their R one after the other, and one launch multiplies as many of them as fill the GPU. Only
X Xᵀ and Q X are launched for each length:

    X (2, m, 3 m) ─ X Xᵀ ─┐                         ┌─ Q X
                          ├─► R (7, m, m) ─► Q ─────┤
    X (5, m, 4 m) ─ X Xᵀ ─┘                         └─ Q X
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..iteration import Iteration
from ..kernels.newton_schulz import apply_window, gram_matrix, places_in_turn, window_product
from ..kernels.normalization import normalize
from ..kernels.products import Products
from ..kernels.tracing import is_transformed
from ..schedules import Schedule
from .packing import even_pieces, matrices_together


class Operand(NamedTuple):
    """Matrices G (B, m, n) whose polar factors are needed, with the other arguments of `factors.polar_factors`."""

    G: Tensor
    iteration: Iteration
    eps: float
    out: Optional[Tensor] = None
    norms: Optional[Tensor] = None

    @property
    def wide(self) -> Tensor:
        """G, or Gᵀ if G is tall."""
        return self.G.mT if self.is_tall else self.G

    @property
    def is_tall(self) -> bool:
        """Whether G has more rows than columns."""
        return self.G.size(-2) > self.G.size(-1)


def chain_key(device: torch.device, iteration: Iteration) -> Optional[tuple]:
    """Return what iterations with one short side must have in common to share their m x m products.

    None if they share none: on a CPU, where each thread takes a matrix; in the standard iteration; in one launch; and
    if products take one matrix at a time.
    """
    one_by_one = device.type == "cpu" or not iteration.products.batched
    if one_by_one or iteration.in_one_launch or iteration.method == "standard":
        return None
    method, windows, scale, work_dtype, chain_dtype, products, _ = iteration
    return method, windows, scale, work_dtype, chain_dtype, products.square_name


def chained_polar_factors(operands: Sequence[Operand]) -> list[Tensor]:
    """Return the polar factors (B, m, n) of each operand, in the work dtype and without checks.

    The operands' matrices have one short side, and their iterations one `chain_key`. Factors are written to `out`
    where that is given. `factors.iteration_bytes` says how much memory this takes. If the chain has another dtype, one
    batch at a time is copied to that.
    """
    first = operands[0].iteration
    windows, places = first.windows, [_places(operand) for operand in operands]
    Xs = [
        normalize(each.wide, first.work_dtype, each.eps, first.scale, broadcast_norms(each.norms), place)
        for each, (place, *_) in zip(operands, places)
    ]
    tables = [operand.iteration.products for operand in operands]
    for end, window in enumerate(windows, 1):
        Q = _window_products(_gram_matrices(Xs, tables, first.chain_dtype), window, first).to(first.work_dtype)
        each = zip(Q.split([len(X) for X in Xs]), Xs, tables, places)
        Xs = [apply_window(part, X, window, table, place[end]) for part, X, table, place in each]
        del Q, each  # before the next window needs as much memory
    return [X.mT if operand.is_tall else X for operand, X in zip(operands, Xs)]


def broadcast_norms(norms: Optional[Tensor]) -> Optional[Tensor]:
    """Return norms (B,) as (B, 1, 1), one for each matrix of a batch."""
    return None if norms is None else norms.view(-1, 1, 1)


def _places(operand: Operand) -> list[Optional[Tensor]]:
    """Return where an operand's wide matrices are written: normalised, and at the end of each window."""
    out = operand.out if operand.out is None or not operand.is_tall else operand.out.mT
    return places_in_turn(out, len(operand.iteration.windows), operand.iteration.products)


def _gram_matrices(Xs: Sequence[Tensor], tables: Sequence[Products], chain_dtype: torch.dtype) -> Tensor:
    """Return X Xᵀ (b, m, m) of all X (B, m, n), one after the other."""
    if len(Xs) == 1:
        return gram_matrix(Xs[0], tables[0], chain_dtype)
    counts, m = [len(X) for X in Xs], Xs[0].size(1)
    R = Xs[0].new_empty(sum(counts), m, m, dtype=chain_dtype)
    for X, table, part in zip(Xs, tables, R.split(counts)):
        gram_matrix(X, table, chain_dtype, part)
    return R


def _window_products(R: Tensor, window: Schedule, iteration: Iteration) -> Tensor:
    """Return the product of a window's steps (b, m, m), of as many matrices at once as are worked on together."""
    products, m = iteration.products, R.size(1)
    # Traced and transformed products write to no part of a tensor.
    whole = torch.compiler.is_compiling() or is_transformed(R)
    length = len(R) if whole else matrices_together(R.device, (m, m), iteration)
    pieces = even_pieces(len(R), length)
    if len(pieces) == 1:
        return window_product(R, window, products)
    Q = torch.empty_like(R)
    for start, end in pieces:
        window_product(R[start:end], window, products, Q[start:end])
    return Q
