"""Long matrices in parts along their long side: ranks sum a small Gram matrix instead of sending the parts.

With X = [X_1 ... X_R], X Xᵀ is the sum of X_r X_rᵀ, and the polar factor Q X has the parts Q X_r: each rank makes the
same Q. A window of the Gram iteration takes a sum of m x m over the ranks, and the first one a sum of norms before it.
"""

from __future__ import annotations

from typing import Generator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..kernels.host_copy import moved
from ..plan.process_groups import explaining_timeouts
from ..polar.factors import factor_of_parts
from .finish import UpdateNorms, finish_updates_
from .pipeline import advance
from .polar_update import update_of_factors_
from .recipe import StepContext
from .sharded import ShardedParts
from .workspace import LocalBatch


def update_sum_(
    work: LocalBatch, context: StepContext, group: dist.ProcessGroup
) -> Generator[None, None, list[UpdateNorms]]:
    """Update this rank's parts of a batch and their momentum; yields once after each sum that was started.

    Matrices without a gradient on any rank do not change. Returns the norms of the parts' updates.
    """
    batch, parameter = work.batch, work.batch.first.parameter
    recipe, iteration = context.recipe(work.recipe_key), batch.first.iteration
    parts = ShardedParts(work.parts, recipe)
    shape = len(batch.matrices), batch.rows, batch.cols
    packed = torch.empty(shape, dtype=parameter.packed_dtype, device=parameter.device)
    if work.parts:
        parts.pack_(packed)
    present = moved(_presence(parts, len(packed)), packed.device)
    sums = factor_of_parts(packed.mT if batch.tall else packed, present, iteration, recipe.eps)
    del packed
    factor, present = yield from _summed_(sums, work, group)
    if not work.parts:
        return []
    updates, norms = finish_updates_(update_of_factors_(factor.mT if batch.tall else factor), recipe)
    parts.descend_(updates, work.multiplier, present)
    return [UpdateNorms(norms, factor[0].numel(), work.multiplier, recipe.descent.lr, present > 0)]


def _presence(parts: ShardedParts, count: int) -> Tensor:
    """Return, as float64 (B) on the CPU, 1 for each matrix with a gradient on this rank, else 0."""
    present = [float(bool(parts.parts) and i not in parts.absent) for i in range(count)]
    return torch.tensor(present, dtype=torch.float64, device="cpu")


def _summed_(
    sums: Generator, work: LocalBatch, group: dist.ProcessGroup
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Sum over the ranks, in place, what `sums` yields, and return its result; yields while a sum is on its way."""
    while True:
        with record_function("muon.orthogonalize"):
            goes_on, values = advance(sums)
        if not goes_on:
            return values
        with record_function("muon.send"), explaining_timeouts("parts", work.batch.names):
            pending = dist.all_reduce(values, group=group, async_op=True)
        yield
        with record_function("muon.wait"), explaining_timeouts("parts", work.batch.names):
            pending.wait()
