"""Gram sums: ranks keep their parts of a long matrix and only sum its small Gram matrix (`step/gram_sums.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Hashable, Optional, Sequence

from ..parameters.names import listed
from ..parameters.sequences import grouped
from ..rules.equalization import Equalization
from .batches import slices
from .costs import FLOPS_OF_AN_ELEMENT, standard_step_flops, sum_cost
from .exchanges import MOST_CHUNK_BYTES
from .matrix import Matrix, names_of_parameters
from .process_groups import Ranks
from .runs import length


@dataclass(frozen=True, eq=False)
class SummedBatch:
    """Matrices of one size that all of `ranks` orthogonalize together; this rank has a part rows x cols of each."""

    ranks: Ranks
    matrices: tuple[Matrix, ...]
    rows: int
    cols: int
    tall: bool  # the matrices are cut along their rows
    names: str  # of the first few parameters, for error messages

    @property
    def first(self) -> Matrix:
        """The first matrix. What matrices of a batch have in common is read from it."""
        return self.matrices[0]

    def __str__(self) -> str:
        return f"{self.first.iteration}, Gram matrices summed over {len(self.ranks)} ranks"


def as_summed(matrix: Matrix) -> Optional[Matrix]:
    """Return the matrix with the iteration that sums its Gram matrix; None if that is not possible, or costs more.

    The matrix must be cut along its long side, and there must be one copy: several copies might be summed in different
    orders. Equalization, second moments and Hyperball need whole rows and columns, so such matrices go to an owner.
    """
    parameter = matrix.parameter
    if parameter.equalization != Equalization() or parameter.moments_view is not None or parameter.keeps_norm:
        return None
    if matrix.shards.copies > 1 or matrix.shards.lengthwise(matrix.index) is None:
        return None
    iteration = matrix.summed_iteration("gram_float32")
    if iteration is None:
        return None
    summed = replace(matrix, iteration=iteration)
    return summed if _is_cheaper(summed) else None


def plan_sums(matrices: Sequence[Matrix], rank: int, chunk_bytes: Optional[int]) -> tuple[tuple[SummedBatch, ...], ...]:
    """Return the batches that `rank` works on by summing Gram matrices, grouped by the ranks that sum.

    On each rank a batch packs at most `chunk_bytes` (None: MOST_CHUNK_BYTES), or it is one matrix. On CPUs it is always
    one: gloo adds in an order that depends on a number's place in the message, so a batch would change a matrix's bits.
    """
    here = [matrix for matrix in matrices if rank in matrix.holders]
    batches: list[SummedBatch] = []
    for members in grouped(here, _batch_key):
        first = members[0]
        bytes_of_one = first.part_size * first.parameter.packed_dtype.itemsize
        on_cpu = first.parameter.device.type == "cpu"
        count = 1 if on_cpu else max(1, (chunk_bytes or MOST_CHUNK_BYTES) // bytes_of_one)
        batches += [_batch(together, rank) for together in slices(members, count)]
    by_ranks = grouped(batches, lambda batch: batch.ranks)
    return tuple(map(tuple, sorted(by_ranks, key=lambda sharing: sharing[0].ranks)))


def sums_described(batches: Sequence[SummedBatch]) -> str:
    """Return a line for `explain()` about batches that are summed by the same ranks."""
    matrices = sum(len(batch.matrices) for batch in batches)
    messages = sum(1 + len(batch.first.iteration.windows) for batch in batches)
    subject = "1 matrix whose Gram matrix" if matrices == 1 else f"{matrices} matrices whose Gram matrices"
    return f"{subject} {len(batches[0].ranks)} ranks sum, {messages} messages"


def _is_cheaper(matrix: Matrix) -> bool:
    """Whether summing the Gram matrix costs less than sending the parts to an owner and back."""
    (m, n), steps = matrix.size, len(matrix.parameter.schedule)
    parts, windows = len(matrix.holders), len(matrix.iteration.windows)
    by_owners = steps * standard_step_flops(m, n) + FLOPS_OF_AN_ELEMENT * 2 * m * n
    return sum_cost(matrix.size, steps, windows, parts) < by_owners / parts


def _batch_key(matrix: Matrix) -> Hashable:
    """Return what the matrices of a batch have in common on all ranks, including which part of each a rank has."""
    shards = matrix.shards
    number = matrix.index % len(shards.view.rows)
    return matrix.holders, matrix.batch_key, shards.layout, shards.view.rows, number


def _batch(matrices: Sequence[Matrix], rank: int) -> SummedBatch:
    """Return the batch of matrices that have one `_batch_key`."""
    first = matrices[0]
    part, side = first.part(rank), first.shards.lengthwise(first.index)
    return SummedBatch(
        ranks=first.holders,
        matrices=tuple(matrices),
        rows=length(part.rows) if side == 0 else first.rows,
        cols=length(part.cols) if side == 1 else first.cols,
        tall=side == 0,
        names=listed(names_of_parameters(matrices)),
    )
