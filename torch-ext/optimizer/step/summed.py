"""Long matrices in parts along their long side: ranks sum a small Gram matrix instead of sending the parts.

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
    # The device is not waited for.
    present = _presence(parts, len(packed)).to(packed.device, non_blocking=True)
    sums = factor_of_parts(packed.mT if batch.tall else packed, present, iteration, recipe.eps)
    del packed
    factor, present = yield from _summed_(sums, work, group)
    if not work.parts:
        return []
    updates, norms = update_of_factors(factor.mT if batch.tall else factor)
    parts.descend_(updates, work.multiplier, present)
    return [UpdateNorms(norms.where(present > 0, 0.0), factor.numel(), work.multiplier, recipe.descent.lr)]


def factor_of_parts(
    wide: Tensor, counts: Tensor, iteration: Iteration, eps: float
) -> Generator[Tensor, None, tuple[Tensor, Tensor]]:
    """Return this rank's columns of the polar factors of wide matrices, and the sum of all ranks' `counts`.

    `wide` (B, m, n_r) are this rank's columns, `counts` (B) float64. Yields each tensor that is to be summed over the
    ranks, in place, before it goes on: first squared norms and counts, then for each window of the iteration a Gram
    matrix, in float32 at least.
    """
    sums = torch.stack([frobenius_norm(wide).flatten().square(), counts])
    yield sums
    squares, counts = sums
    X = normalize(wide, iteration.work_dtype, eps, iteration.scale, squares.sqrt().view(-1, 1, 1))
    del wide
    for window in iteration.windows:
        R = _each(iteration, X.to(iteration.chain_dtype), iteration.products.gram)
        R = R.to(torch.promote_types(R.dtype, torch.float32))
        yield R
        X = _times_window(iteration, R.to(iteration.chain_dtype), window, X)
    return X, counts.float()


def _presence(parts: ShardedParts, count: int) -> Tensor:
    """Return, float64 (B) on the CPU, 1 where this rank has a gradient."""
    present = [float(bool(parts.parts) and i not in parts.absent) for i in range(count)]
    return torch.tensor(present, dtype=torch.float64, device="cpu")


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


def _summed_(sums: Generator, work: LocalBatch, group: dist.ProcessGroup) -> Iterator[None]:
    """Sum over the ranks, in place, what `sums` yields, and return its result; yields while a sum is on its way."""
    while True:
        try:
            values = next(sums)
        except StopIteration as end:
            return end.value
        with record_function("muon.send"), explaining_timeouts("parts", work.batch.names):
            pending = dist.all_reduce(values, group=group, async_op=True)
        yield
        with record_function("muon.wait"), explaining_timeouts("parts", work.batch.names):
            pending.wait()
