"""Long matrices that lie in parts along their long side: ranks sum a small Gram matrix instead of sending the parts.

With X = [X_1 ... X_R], X Xᵀ is the sum of X_r X_rᵀ, and the polar factor Q X has the parts Q X_r: each rank makes the
same Q. A window of the Gram iteration takes a sum of m x m over the ranks, and the first one a sum of norms before it.
"""

from __future__ import annotations

from typing import Callable, Generator, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..iteration import Iteration
from ..plan.process_groups import explaining_timeouts
from ..polar import frobenius_norm, normalize, window_product
from ..schedules import Schedule
from .batch import UpdateNorms
from .polar_update import update_of_factors
from .recipe import Recipes
from .sharded import ShardedParts
from .workspace import LocalBatch


def update_sum_(
    work: LocalBatch, recipes: Recipes, group: dist.ProcessGroup
) -> Generator[None, None, list[UpdateNorms]]:
    """Update this rank's parts of a batch and their momentum; yields once after each sum that was started.

    What no rank has a gradient of is left alone. Returns the norms of the parts' updates, 0 for those.
    """
    batch, parameter = work.batch, work.batch.first.parameter
    recipe, iteration = recipes.of(batch.matrices), batch.first.iteration
    parts = ShardedParts(work.parts, recipe, recipes.groups)
    shape = len(batch.matrices), batch.rows, batch.cols
    packed = torch.zeros(shape, dtype=parameter.packed_dtype, device=parameter.device)
    if work.parts:
        parts.pack_(packed)
    wide = packed.mT if batch.tall else packed
    sums = _first_sums(parts, wide)
    yield from _summed_(sums, work, group)
    present = sums[1].float()
    X = normalize(wide, iteration.work_dtype, recipe.eps, iteration.scale, sums[0].sqrt().view(-1, 1, 1))
    for window in iteration.windows:
        R = _each(iteration, X.to(iteration.chain_dtype), iteration.products.gram)
        yield from _summed_(R, work, group)
        X = _times_window(iteration, R, window, X)
    if not work.parts:
        return []
    updates, norms = update_of_factors(X.mT if batch.tall else X)
    parts.descend_(updates, work.multiplier, present)
    return [UpdateNorms(norms.where(present > 0, 0.0), X.numel(), work.multiplier, recipe.descent.lr)]


def _first_sums(parts: ShardedParts, wide: Tensor) -> Tensor:
    """Return, float64, of each matrix what is summed first: its squared norm, and 1 where there is a gradient."""
    present = [float(bool(parts.parts) and i not in parts.absent) for i in range(len(wide))]
    squares = frobenius_norm(wide).flatten().square()
    # The device is not waited for.
    return torch.stack([squares, torch.tensor(present, dtype=torch.float64).to(wide.device, non_blocking=True)])


@record_function("muon.orthogonalize")
def _times_window(iteration: Iteration, R: Tensor, window: Schedule, X: Tensor) -> Tensor:
    """Return Q X for the window's product Q, from the Gram matrices R of whole matrices."""
    Q = _each(iteration, R, lambda matrices: window_product(matrices, window, iteration.products))
    return torch.bmm(Q.to(X.dtype), X)


def _each(iteration: Iteration, matrices: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `function` of matrices (B, m, n), one at a time where the products take only one."""
    if iteration.products.batched:
        return function(matrices)
    return torch.stack([function(matrix) for matrix in matrices])


def _summed_(values: Tensor, work: LocalBatch, group: dist.ProcessGroup) -> Iterator[None]:
    """Sum `values` over the ranks in place; yields while that is on its way."""
    with record_function("muon.send"), explaining_timeouts("parts", work.batch.names):
        pending = dist.all_reduce(values, group=group, async_op=True)
    yield
    with record_function("muon.wait"), explaining_timeouts("parts", work.batch.names):
        pending.wait()
