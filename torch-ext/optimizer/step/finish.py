"""From updates to parameters, for all ways of working on a matrix: rules with a state, norms, and the descent."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.native import IS_PORTABLE
from ..kernels.normalization import frobenius_norm, has_native_passes
from ..parameters.settings import Group
from ..parameters.state import REMAINDER
from ..plan.batches import Batch
from ..rules.descent import DescentOptions, Number, descend_packed_
from ..rules.hyperball import move_on_sphere_, replacing
from ..rules.second_moment import balance_
from .local_matrix import ROW_SCALE, LocalMatrix, others_of, views_of
from .polar_update import norms_like
from .recipe import Recipe


class UpdateNorms(NamedTuple):
    """The Frobenius norms (B,) of a batch's updates, and the step size applied to them.

    `active` says which of the matrices have a gradient on any rank, None that all have.
    """

    norms: Tensor
    elements: int  # of one update
    multiplier: Number
    lr: Tensor
    active: Optional[Tensor] = None

    @property
    def applied(self) -> Tensor:
        """The norms, 0 for matrices that no rank has a gradient of."""
        return self.norms if self.active is None else self.norms.where(self.active, 0.0)


def norms_memory_for_descent(batch: Batch, updates: Tensor) -> Optional[Tensor]:
    """Return memory for the norms (B,) of a batch's updates, which the descent is to write; None if it cannot.

    It can if it applies the updates as they come from orthogonalization, and if the compiled passes take them. Torch's
    functions would read the updates once more for the norms, in many launches.
    """
    changed = batch.moments_shape is not None or batch.first.parameter.keeps_norm
    takes_them = not (IS_PORTABLE or changed) and has_native_passes(batch.device, updates.dtype)
    return norms_like(updates) if takes_them else None


def norms_of_updates(updates: Tensor) -> Tensor:
    """Return the Frobenius norms (B,) of updates, in a pass over them, for those that the descent cannot write.

    They are at least float32, and NaN for an update that is not finite.
    """
    dtype = torch.promote_types(updates.dtype, torch.float32)
    if updates.device.type == "cpu":  # where torch's threads would hold the cores for a while after its own norm
        return frobenius_norm(updates).flatten().to(dtype)
    return torch.linalg.vector_norm(updates, dim=(-2, -1), dtype=dtype)


def finish_updates_(
    updates: Tensor,
    recipe: Recipe,
    moments: Optional[Tensor] = None,
    weights: Optional[Tensor] = None,
    norms: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rules with a state to updates (B, rows, cols) of whole matrices, in place.

    Returns what the matrices descend by, and the norms (B,) of the updates. Second `moments`, if given, balance the
    updates; both change. If norms of matrices are kept, `weights` are the matrices: the new ones take their place, and
    are what is returned. `norms`, if given, is returned as it is, because the descent will write to it; without it the
    norms are computed here.
    """
    # Computed before second moments change the updates. Hyperball returns norms of its own.
    if norms is None and weights is None:
        norms = norms_of_updates(updates)
    if moments is not None:
        balance_(updates, moments, recipe.second_moment_beta)
    if weights is None:
        return updates, norms
    return weights, move_on_sphere_(weights, updates, recipe.descent.lr)


def descend_parts_(
    parts: Sequence[LocalMatrix],
    updates: Tensor,
    recipe: Recipe,
    multiplier: Number,
    options: DescentOptions,
) -> None:
    """Move parts of matrices by what `finish_updates_` returned; `options` has norms, offsets and flags of those."""
    keeps_norm = parts[0].matrix.parameter.keeps_norm
    rule = replacing() if keeps_norm else recipe.descent._replace(multiplier=multiplier)
    options = options._replace(
        row_scale=_row_scales(parts),
        seeds=_seeds(parts, recipe.groups),
        found_inf=recipe.scaling.found_inf,
        remainder=others_of(parts, REMAINDER),
    )
    descend_packed_(views_of(parts), updates, rule, options)


def _row_scales(parts: Sequence[LocalMatrix]) -> Optional[Tensor]:
    """Return QK-clip's factor for each row of all parts, 1 for rows without scaling; None if no part is scaled."""
    if not parts[0].tensors.others[ROW_SCALE]:
        return None
    scales = [part.get(ROW_SCALE) for part in parts]
    ones = next((scale.new_ones(1) for scale in scales if scale is not None), None)
    if ones is None:
        return None
    return torch.cat([ones.expand(len(p.view)) if scale is None else scale for p, scale in zip(parts, scales)])


def _seeds(parts: Sequence[LocalMatrix], groups: Sequence[Group]) -> Optional[Tensor]:
    """Return the seed of each part; None if nothing is rounded stochastically."""
    numbers = None if parts[0].origin is None else [part.seed(groups) for part in parts]
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int64, device="cpu")
