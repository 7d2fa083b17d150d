"""One batch's way through the step: momentum and packing, orthogonalization, descent; and how chunks take turns."""

from __future__ import annotations

from collections import deque
from typing import Callable, Iterable, Iterator, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..matrices import MatrixView
from ..parameters import GradientScaling
from ..polar import polar_factors
from ..rules.descent import DescentRule, Destination, descend_packed_
from ..rules.momentum import MomentumRule, pack_momentum_
from .placement import local_part
from .plan import Batch

_DONE = object()


class Gradients:
    """The matrices of one parameter's gradient: cut when the first is taken, and let go with the last if `release`."""

    def __init__(self, p: Tensor, view: MatrixView, release: bool = False):
        self._p, self._view, self._release = p, view, release
        self._left: Optional[dict[int, Tensor]] = None

    def take(self, position: int) -> Tensor:
        """Return the matrix at this position of the view, once."""
        if self._left is None:
            cut = self._view.matrices(local_part(self._p.grad), read_only=True)
            self._left = {i: matrix for i, matrix in enumerate(cut) if matrix.numel()}
        matrix = self._left.pop(position)
        if self._release and not self._left:
            self._p.grad = None
        return matrix


class LocalMatrix(NamedTuple):
    """What this process has of a matrix: views of its parameter and momentum buffer, rows x cols, and its gradient."""

    parameter: Tensor
    buffer: Tensor
    gradients: Optional[Gradients]  # None: there is none
    position: int = 0  # among the gradients
    row_scale: Optional[Tensor] = None  # float32, an entry per row
    seed: Optional[int] = None  # with which the parameter is rounded stochastically
    origin: tuple[int, int, int] = (0, 0, 0)  # first row and column in the whole, and the columns of that


def zero_part(rows: int, cols: int, like: Tensor) -> LocalMatrix:
    """Return a matrix of zeros with all that belongs to it, of the dtype and device of `like`."""
    p = torch.zeros(rows, cols, dtype=like.dtype, device=like.device)
    p.grad = torch.zeros_like(p)
    return LocalMatrix(p, torch.zeros_like(p), Gradients(p, MatrixView("matrix", 1, (rows,), cols, 1.0, ())))


class Recipe(NamedTuple):
    """What a step does to the matrices of one batch, before and after they are orthogonalized."""

    momentum: MomentumRule
    eps: float
    descent: DescentRule
    scaling: GradientScaling


def update_batch_(batch: Batch, parts: Sequence[LocalMatrix], recipe: Recipe) -> Tensor:
    """Update the parameters and momentum buffers of one batch in place, from its gradients.

    Returns the Frobenius norms (B,) of the polar factors, float32: those of matrices that are not finite are NaN.
    """
    parameters = [part.parameter for part in parts]
    packed, directions = batch.empty(len(parts), parameters[0].device)
    buffers, gradients = [part.buffer for part in parts], [part.gradients.take(part.position) for part in parts]
    pack_momentum_(buffers, gradients, directions, recipe.momentum, recipe.scaling)
    del gradients  # which may be the last to hold their memory
    factors = polar_factors(packed, batch.iteration, recipe.eps)
    rule = recipe.descent._replace(multiplier=batch.multiplier)
    destination = Destination(packed_row_scales(parts), seeds(parts), recipe.scaling.found_inf)
    descend_packed_(parameters, batch.unturned(factors), rule, destination)
    return norms_of(factors)


def norms_of(factors: Tensor) -> Tensor:
    """Return the Frobenius norms (B,) of polar factors (B, m, n), at least float32."""
    return torch.linalg.vector_norm(factors, dim=(-2, -1), dtype=torch.promote_types(factors.dtype, torch.float32))


def run_pipeline(exchanges: Iterable[Iterable[Iterator[None]]], in_flight: int, meanwhile: Callable[[], None]) -> None:
    """Advance the chunks of each exchange, generators that yield while a message flies, until all are done.

    While one computes, up to `in_flight` others have a message on its way: the newest goes first, so that its gather
    and an older one's scatter are hidden. Exchanges come one after the other, since two groups of NCCL must not have
    messages on their way at once. `meanwhile` is work of this process alone, behind the first chunk's gather.
    """
    left = [meanwhile]
    for chunks in exchanges:
        waiting, running = deque(chunks), []
        while waiting or running:
            if waiting and len(running) <= in_flight:
                running.insert(0, waiting.popleft())
            running = [chunk for chunk in running if next(chunk, _DONE) is not _DONE]
            while left:
                left.pop()()
    while left:
        left.pop()()


def packed_row_scales(parts: Sequence[LocalMatrix]) -> Optional[Tensor]:
    """Return an entry for each row of all parts, 1 for those that are not scaled; None where none is."""
    given = [part.row_scale for part in parts if part.row_scale is not None]
    if not given:
        return None
    ones = given[0].new_ones(1)
    return torch.cat([ones.expand(len(part.parameter)) if part.row_scale is None else part.row_scale for part in parts])


def seeds(parts: Sequence[LocalMatrix]) -> Optional[Tensor]:
    """Return the seed of each part, None where nothing is rounded stochastically."""
    if parts[0].seed is None:
        return None
    return torch.tensor([part.seed for part in parts], dtype=torch.int64, device="cpu")
