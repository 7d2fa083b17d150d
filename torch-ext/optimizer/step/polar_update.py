"""From packed momentum to updates: the iteration, and the one place between orthogonalization and descent.

The matrices of this process, those of an owner and those whose Gram matrix is summed all come through
`update_of_factors`. An update rule that goes on from the polar factor belongs there, unless it has a state: a rule with
a state (`rules.second_moment`) is called afterwards, where that state is. docs/architecture.md says where it lives.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.formats import exact_dtype
from ..kernels.native import IS_PORTABLE, frobenius_norm_
from ..kernels.normalization import frobenius_norm, native_passes_take
from ..plan.batches import Batch
from ..polar import polar_factors
from ..rules.equalization import equalize, evened, renormalize_


class Packed(NamedTuple):
    """Memory for the packed directions (B, m, n) of a batch, and what makes its updates (B, rows, cols) of them.

    Whoever fills the directions fills `norms` (B,), too, with theirs, unless there are none.
    """

    directions: Tensor
    norms: Optional[Tensor]
    update: Callable[[], Tensor]

    def take_norms_(self) -> None:
        """Write `norms`, if there are any, in a pass over the directions."""
        if self.norms is not None:
            frobenius_norm_(self.norms, _wide(self.directions))


def packed_memory(batch: Batch, count: int, device: torch.device) -> Tensor:
    """Return memory for `count` of a batch's matrices, as they are packed."""
    return torch.empty(count, *batch.packed_shape, dtype=batch.packed_dtype, device=device)


def norms_memory(batch: Batch, packed: Tensor) -> Optional[Tensor]:
    """Return memory for the norms (B,) of packed matrices, or None.

    There are none if the matrices are equalized first, if one kernel does the whole iteration, or if the native passes
    do not take them.
    """
    if batch.equalization.before != "none" or batch.iteration.in_one_launch:
        return None
    return _memory_for_norms(packed) if native_passes_take(packed, batch.iteration.work_dtype) else None


def descended_norms(batch: Batch, updates: Tensor) -> Optional[Tensor]:
    """Return memory for the norms (B,) of a batch's updates, which the descent is to write; None if it cannot.

    It can if it applies the updates as they come from orthogonalization, and if the compiled passes take them. Torch's
    functions would read the updates once more for the norms, in many launches.
    """
    changed = batch.moments_shape is not None or batch.matrices[0].parameter.keeps_norm
    return None if IS_PORTABLE or changed or not native_passes_take(updates) else _memory_for_norms(updates)


def _memory_for_norms(matrices: Tensor) -> Tensor:
    return torch.empty(len(matrices), dtype=exact_dtype(matrices.device), device=matrices.device)


def _wide(packed: Tensor) -> Tensor:
    return packed.mT if packed.size(-2) > packed.size(-1) else packed


def as_parameter(batch: Batch, packed: Tensor) -> Tensor:
    """Return the view (B, rows, cols) of packed matrices."""
    return packed.mT if batch.transposed else packed


def polar_update(
    batch: Batch,
    packed: Tensor,
    eps: float,
    norms: Optional[Tensor] = None,
    factors: Optional[Tensor] = None,
    squares: Optional[Sequence[Tensor]] = None,
) -> Tensor:
    """Return the updates (B, rows, cols) of whole matrices from their packed momentum.

    `norms` (B,) are those of the packed momentum, if they are known. Polar factors are written to `factors` (B, m, n),
    of the work dtype, where that is given; `squares` is memory for `polar_factors`.
    """
    directions = equalized(batch, packed, eps)
    factors = polar_factors(directions, batch.iteration, eps, factors, norms, squares)
    for _ in range(1, batch.equalization.rounds(*batch.packed_shape)):
        directions = evened(directions, factors)
        factors = polar_factors(directions, batch.iteration, eps, factors, None, squares)
    return update_of_factors(as_parameter(batch, factors), batch.equalization.after)


def equalized(batch: Batch, packed: Tensor, eps: float) -> Tensor:
    """Return packed matrices as input of the iteration, with equalized rows and columns if that is set."""
    return as_parameter(batch, equalize(as_parameter(batch, packed), batch.equalization.before, eps))


def update_of_factors(factors: Tensor, renormalization: str = "none") -> Tensor:
    """Return the updates that polar factors (B, rows, cols) become, which they are in place.

    Without `renormalization` they may be the same part of each matrix.
    """
    renormalize_(factors, renormalization)
    return factors


def norms_of_updates(updates: Tensor) -> Tensor:
    """Return the Frobenius norms (B,) of updates, in a pass over them, for those that the descent cannot write.

    They are at least float32, and NaN for an update that is not finite.
    """
    dtype = torch.promote_types(updates.dtype, torch.float32)
    if updates.device.type == "cpu":  # where torch's threads would hold the cores for a while after its own norm
        return frobenius_norm(updates).flatten().to(dtype)
    return torch.linalg.vector_norm(updates, dim=(-2, -1), dtype=dtype)
