"""From packed momentum to updates: the iteration, and the one place between orthogonalization and updates.

The matrices of this process, those of an owner and those whose Gram matrix is summed all come through
`update_of_factors_`. An update rule that goes on from the polar factor belongs there, unless it has a state: a rule
with a state (`rules.second_moment`) is called afterwards, in `finish.py`. docs/architecture.md says where the state
lives.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.formats import exact_dtype
from ..kernels.native import frobenius_norm_
from ..kernels.normalization import has_native_passes
from ..plan.batches import Batch
from ..polar.chains import Operand, chained_polar_factors
from ..polar.factors import polar_factors
from ..rules.equalization import equalize, renormalize_, rescaled_by_factors


class Packed(NamedTuple):
    """Memory for the packed directions (B, m, n) of a batch, and what their polar update needs.

    What writes `directions` also writes their Frobenius norms to `norms` (B,), unless that is None. Polar factors are
    written to `factors` (B, m, n), of the work dtype, unless that is None; `squares` is memory for `polar_factors`.
    """

    batch: Batch
    eps: float
    directions: Tensor
    norms: Optional[Tensor]
    factors: Optional[Tensor] = None
    squares: Optional[Sequence[Tensor]] = None

    def take_norms_(self) -> None:
        """Write `norms`, if there are any, in a pass over the directions."""
        if self.norms is not None:
            frobenius_norm_(self.norms, _wide(self.directions))


class PackedChain(NamedTuple):
    """The batches of a chain as they are packed, and what makes their updates (B, rows, cols) of them."""

    members: Sequence[Packed]
    update: Callable[[], Sequence[Tensor]]


def packed_memory(batch: Batch, count: int) -> Tensor:
    """Return memory for `count` of a batch's matrices, as they are packed."""
    return torch.empty(count, *batch.packed_shape, dtype=batch.packed_dtype, device=batch.device)


def norms_memory(batch: Batch, packed: Tensor) -> Optional[Tensor]:
    """Return memory for the norms (B,) of packed matrices.

    None if they are equalized first, if one kernel does the whole iteration, or if the native passes do not take them.
    """
    if batch.equalization.before != "none" or batch.iteration.in_one_launch:
        return None
    takes_them = has_native_passes(batch.device, batch.packed_dtype, batch.iteration.work_dtype)
    return norms_like(packed) if takes_them else None


def norms_like(matrices: Tensor) -> Tensor:
    """Return memory for the norms (B,) of matrices."""
    return torch.empty(len(matrices), dtype=exact_dtype(matrices.device), device=matrices.device)


def _wide(packed: Tensor) -> Tensor:
    return packed.mT if packed.size(-2) > packed.size(-1) else packed


def as_parameter(batch: Batch, packed: Tensor) -> Tensor:
    """Return the view (B, rows, cols) of packed matrices."""
    return packed.mT if batch.transposed else packed


def polar_updates(members: Sequence[Packed]) -> list[Tensor]:
    """Return the updates (B, rows, cols) of a chain's whole matrices from their packed momentum."""
    if len(members) == 1:
        return [_polar_update(*members)]
    operands = [
        Operand(equalized(batch, directions, eps), batch.iteration, eps, factors, norms)
        for batch, eps, directions, norms, factors, _ in members
    ]
    factors = chained_polar_factors(operands)
    return [updates_of_batch_(each.batch, factor) for each, factor in zip(members, factors)]


def _polar_update(packed: Packed) -> Tensor:
    """Return the updates of a batch that shares no products with others."""
    batch, eps, directions, norms, factors, squares = packed
    directions = equalized(batch, directions, eps)
    factors = polar_factors(directions, batch.iteration, eps, factors, norms, squares)
    for _ in range(1, batch.equalization.rounds(*batch.packed_shape)):
        directions = rescaled_by_factors(directions, factors)
        factors = polar_factors(directions, batch.iteration, eps, factors, None, squares)
    return updates_of_batch_(batch, factors)


def updates_of_batch_(batch: Batch, factors: Tensor) -> Tensor:
    """Turn packed polar factors of whole matrices into updates (B, rows, cols) in place, and return those."""
    return update_of_factors_(as_parameter(batch, factors), batch.equalization.after)


def equalized(batch: Batch, packed: Tensor, eps: float) -> Tensor:
    """Return packed matrices as input of the iteration, with equalized rows and columns if that is set."""
    return as_parameter(batch, equalize(as_parameter(batch, packed), batch.equalization.before, eps))


def update_of_factors_(factors: Tensor, renormalization: str = "none") -> Tensor:
    """Turn polar factors (B, rows, cols) into updates in place, and return them.

    Without `renormalization` the factors may be parts of matrices, such as the same columns of each.
    """
    renormalize_(factors, renormalization)
    return factors
