"""What of a plan is to be measured."""

from __future__ import annotations

from typing import Iterator

from ..kernels.gains import ALONE
from ..plan.batches import grouped
from ..plan.matrix import Matrix
from ..plan.plan import Plan
from ..tuning.contest import Task, tasks_of


def tasks_of_plan(plan: Plan) -> Iterator[Task]:
    """Yield what is to be measured for the matrices that this process works on and shares with no other rank."""
    matrices = [matrix for batch in plan.all_batches() for matrix in batch.matrices]
    yield from tasks_of_matrices([m for m in matrices if m.parameter.circumstances == ALONE])


def tasks_of_matrices(matrices: list[Matrix]) -> Iterator[Task]:
    """Yield what is to be measured for matrices of this process."""

    def kind(matrix: Matrix) -> tuple:
        size = min(matrix.rows, matrix.cols), max(matrix.rows, matrix.cols)
        return matrix.parameter.device, matrix.iteration.chain_dtype, size

    for alike in grouped(matrices, kind):
        yield from tasks_of(*kind(alike[0]), len(alike))
