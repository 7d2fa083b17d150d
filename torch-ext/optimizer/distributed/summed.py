"""Long matrices that lie in parts along their long side: ranks sum a small Gram matrix instead of sending the parts.

With X = [X_1 ... X_R], X Xᵀ is the sum of X_r X_rᵀ, and the polar factor Q X has the parts Q X_r: each rank makes the
same Q. A window of the Gram iteration takes a sum of m x m over the ranks, and the first one a sum of norms before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable, Hashable, Iterator, Mapping, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..iteration import Iteration, iteration_costs, summed_iteration
from ..kernels.gemms import SINGLE
from ..polar import frobenius_norm, normalize, window_product
from ..schedules import Schedule
from .agreement import shortened, waiting
from .exchange_plan import CHUNK_BYTES, FLOPS_OF_AN_ELEMENT, flops
from .held import Held
from .pipeline import LocalMatrix, Recipe, norms_of
from .placement import length
from .plan import Matrix, Planned, positions_by
from .shards import Shards


@dataclass(frozen=True)
class SummedBatch:
    """Parts rows x cols of equal matrices, that this rank has, and how all of `ranks` orthogonalize them together."""

    holders: tuple[int, ...]  # of the parameters
    ranks: tuple[int, ...]  # of the matrices, in rising order
    members: tuple[Matrix, ...]
    names: tuple[str, ...]  # of their parameters
    rows: int
    cols: int
    tall: bool
    multiplier: float
    packed_dtype: torch.dtype
    device: torch.device
    iteration: Iteration

    def __str__(self) -> str:
        return f"{self.iteration}, Gram matrices summed over {len(self.ranks)} ranks"


def split_sums(own: Planned, shards: Shards) -> dict[Matrix, tuple[int, int]]:
    """Return those of a parameter's matrices, with their sizes, whose Gram matrix is to be summed.

    They lie in parts along their long side, and the sums cost less than to send the parts. There is one copy of them:
    others might sum in another order.
    """
    if shards.layout.copies > 1:
        return {}
    return {matrix: size for matrix, size in own.matrices.items() if _is_cheaper(own, shards, matrix)}


def plan_sums(
    planned: Sequence[Planned], shards: Mapping[int, Shards], rank: int, chunk_bytes: Optional[int]
) -> tuple[tuple[SummedBatch, ...], ...]:
    """Return what `rank` works on with others that sum Gram matrices, those of the same ranks together.

    A batch packs at most `chunk_bytes`, None: CHUNK_BYTES, on each rank, or is one matrix.
    """
    every = [(own, matrix) for own in planned for matrix in own.matrices]
    every = [(own, matrix) for own, matrix in every if rank in shards[matrix.parameter].holders(matrix.index)]
    batches = []
    for positions in positions_by(_kind(own, matrix, shards[matrix.parameter]) for own, matrix in every):
        own, matrix = every[positions[0]]
        batch = _batch(own, matrix, shards[matrix.parameter], rank)
        held = -(-math.prod(own.matrices[matrix]) // len(batch.ranks)) * batch.packed_dtype.itemsize
        single = batch.iteration.gemms.name == SINGLE.name
        count = 1 if single else max(1, (chunk_bytes or CHUNK_BYTES) // held)
        for start in range(0, len(positions), count):
            members = [every[i] for i in positions[start : start + count]]
            names = tuple(dict.fromkeys(own.name for own, _ in members))
            batches.append(replace(batch, members=tuple(matrix for _, matrix in members), names=names))
    groups = sorted(positions_by(batch.ranks for batch in batches), key=lambda group: batches[group[0]].ranks)
    return tuple(tuple(batches[i] for i in group) for group in groups)


def described(batches: Sequence[SummedBatch]) -> str:
    """Return what is summed by the same ranks, as one line."""
    matrices = sum(len(batch.members) for batch in batches)
    messages = sum(1 + len(batch.iteration.windows) for batch in batches)
    return f"{matrices} matrices whose Gram matrices {len(batches[0].ranks)} ranks sum, {messages} messages"


def update_summed(
    batch: SummedBatch,
    parts: Mapping[Matrix, LocalMatrix],
    recipe: Recipe,
    group: dist.ProcessGroup,
    seen: list[tuple[SummedBatch, Tensor]],
) -> Iterator[None]:
    """Update this rank's parts of a batch and their momentum; yields once after each sum that was started.

    What nobody has a gradient of is left alone. `seen` gets the norms of the parts' updates, 0 for those.
    """
    held = Held([parts[matrix] for matrix in batch.members if matrix in parts])  # none if the parts are empty
    packed = torch.zeros(len(batch.members), batch.rows, batch.cols, dtype=batch.packed_dtype, device=batch.device)
    if held.parts:
        held.pack_(packed, recipe)
    wide = packed.mT if batch.tall else packed
    sums = _first_sums(held, wide)
    yield from _summed_(sums, batch, group)
    present = sums[1].float()
    norm, iteration = sums[0].sqrt().view(-1, 1, 1), batch.iteration
    X = normalize(wide, iteration.work_dtype, recipe.eps, iteration.scale, norm)
    for window in iteration.windows:
        R = _each(iteration, X.to(iteration.chain_dtype), iteration.gemms.gram)
        yield from _summed_(R, batch, group)
        X = _times_window(iteration, R, window, X)
    if held.parts:
        held.descend_(X.mT if batch.tall else X, recipe, batch.multiplier, present)
        seen.append((batch, norms_of(X).where(present > 0, 0.0)))


def _is_cheaper(own: Planned, shards: Shards, matrix: Matrix) -> bool:
    (m, n), steps = sorted(own.matrices[matrix]), len(own.settings.schedule)
    iteration = _iteration(own, (m, n))
    if iteration is None or shards.lengthwise(matrix.index) is None:
        return False
    parts, windows = len(shards.holders(matrix.index)), len(iteration.windows)
    # Of products that save nothing, as for owners, so that all ranks decide alike.
    _, products = iteration_costs(m, n / parts, steps, windows, SINGLE)
    # To sum a matrix over a ring each rank sends it twice, here in float32, two elements' worth.
    together = products + FLOPS_OF_AN_ELEMENT * windows * 2 * 2 * m * m
    return together < (steps * flops(m, n) + FLOPS_OF_AN_ELEMENT * 2 * m * n) / parts


def _kind(own: Planned, matrix: Matrix, shards: Shards) -> Hashable:
    """Return what matrices of a batch have in common, on all ranks: also which part of each a rank has."""
    number = matrix.index % len(shards.view.rows)
    return shards.holders(matrix.index), own.kind, shards.layout, shards.view.rows, number


def _batch(own: Planned, matrix: Matrix, shards: Shards, rank: int) -> SummedBatch:
    part, side = shards.part(matrix.index, rank), shards.lengthwise(matrix.index)
    size = own.matrices[matrix]
    return SummedBatch(
        holders=shards.layout.mesh.members,
        ranks=shards.holders(matrix.index),
        members=(matrix,),
        names=(own.name,),
        rows=length(part.rows) if side == 0 else size[0],
        cols=length(part.cols) if side == 1 else size[1],
        tall=side == 0,
        multiplier=own.multiplier(matrix),
        packed_dtype=own.packed_dtype,
        device=own.parameter.device,
        iteration=_iteration(own, size),
    )


def _iteration(own: Planned, size: tuple[int, int]) -> Optional[Iteration]:
    sides = (min(size), max(size))
    return summed_iteration(own.parameter.device, own.work_dtype, sides, own.settings.schedule)


def _first_sums(held: Held, wide: Tensor) -> Tensor:
    """Return, float64, of each matrix what is summed first: its squared norm, and 1 where there is a gradient."""
    present = [float(bool(held.parts) and i not in held.late) for i in range(len(wide))]
    squares = frobenius_norm(wide).flatten().square()
    # The device is not waited for.
    return torch.stack([squares, torch.tensor(present, dtype=torch.float64).to(wide.device, non_blocking=True)])


@record_function("muon.orthogonalize")
def _times_window(iteration: Iteration, R: Tensor, window: Schedule, X: Tensor) -> Tensor:
    """Return Q X for the window's product Q, from the Gram matrices R of whole matrices."""
    Q = _each(iteration, R, lambda own: window_product(own, window, iteration.gemms))
    return torch.bmm(Q.to(X.dtype), X)


def _each(iteration: Iteration, matrices: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `function` of matrices (B, m, n), one at a time where the products take only one."""
    if iteration.gemms.name != SINGLE.name:
        return function(matrices)
    return torch.stack([function(matrix) for matrix in matrices])


def _summed_(values: Tensor, batch: SummedBatch, group: dist.ProcessGroup) -> Iterator[None]:
    """Sum `values` over the ranks in place; yields while that is on its way."""
    with record_function("muon.send"):
        work = dist.all_reduce(values, group=group, async_op=True)
    yield
    with record_function("muon.wait"), waiting(f"parts of {shortened(batch.names)}"):
        work.wait()
