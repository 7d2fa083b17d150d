"""Teams: neighbouring ranks that work together on a matrix that would take one rank longer than the rest of the step.

The owner hands each member some columns of the wide matrix. The members sum their Gram matrices, and the owner gets the
columns of the polar factor back (`step/team.py`). Products with the long side are shared; each member repeats the
m x m products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Optional, Sequence

from ..parameters.sequences import grouped
from .batches import Batch, plan_batches
from .costs import team_cost, useful_copies
from .layout import Layout
from .matrix import Matrix
from .process_groups import Ranks


@dataclass(frozen=True, eq=False)
class Team:
    """A matrix that `ranks` work on together, as one of these ranks sees it; `owner` is one of them."""

    batch: Batch  # with this one matrix
    ranks: Ranks
    owner: int
    widths: tuple[int, ...]  # how many columns of the wide matrix each rank has

    @property
    def matrix(self) -> Matrix:
        """The matrix that the team works on."""
        return self.batch.first

    def width(self, rank: int) -> int:
        """Return how many columns `rank` has."""
        return self.widths[self.ranks.index(rank)]

    @property
    def work_bytes(self) -> int:
        """The most bytes a member holds: the owner, whose whole matrix and factor are copied while they are cut."""
        (m, n), iteration = sorted(self.batch.packed_shape), self.matrix.iteration
        packed, work = self.batch.packed_dtype.itemsize, iteration.work_dtype.itemsize
        return 2 * m * n * (packed + work) + m * max(self.widths) * (packed + 2 * work + 4) + 6 * m * m * 4


def team_of(matrix: Matrix, ranks: Sequence[int]) -> Team:
    """Return the team of a matrix. The first of `ranks` is the owner."""
    (batch,), n, members = plan_batches([matrix]), max(matrix.rows, matrix.cols), len(ranks)
    ends = [n * i // members for i in range(members + 1)]
    widths = tuple(stop - start for start, stop in zip(ends, ends[1:]))
    return Team(batch, tuple(sorted(ranks)), ranks[0], widths)


def with_teams(matrices: Sequence[Matrix], ranks_per_matrix: int) -> list[Matrix]:
    """Return `matrices` in their order, with the most costly ones given to teams as long as that shortens a step.

    A team makes the largest work of one rank smaller but the total larger, because each member repeats the m x m
    products. Matrices of equal cost are treated alike, and all ranks decide alike.
    """
    if ranks_per_matrix == 1:
        return list(matrices)
    by_cost = grouped(sorted(matrices, key=lambda matrix: -matrix.cost), lambda matrix: matrix.cost)
    taken: dict[Matrix, Matrix] = {}
    chosen, best = taken, _step_cost(matrices)
    for equals in by_cost:
        shared = {matrix: _shared(matrix, ranks_per_matrix) for matrix in equals}
        if None in shared.values():
            break
        taken = {**taken, **shared}
        cost = _step_cost([taken.get(matrix, matrix) for matrix in matrices])
        if cost >= best:
            break
        chosen, best = taken, cost
    return [chosen.get(matrix, matrix) for matrix in matrices]


def _step_cost(matrices: Sequence[Matrix]) -> float:
    """Return about what a step costs each rank, in FLOPs, as if matrices with other numbers of copies came afterwards.

    `replica_groups` decides for all copied matrices of a family together, and exchanges some of these in one go.
    """
    cost = 0.0
    for together in grouped(matrices, lambda matrix: matrix.shards.copies):
        largest = max(together, key=lambda matrix: matrix.cost)
        work, copies, size = sum(matrix.work for matrix in together), largest.shards.copies, largest.rows * largest.cols
        cost += useful_copies(work, largest.cost, size, largest.ranks_per_copy, copies)[1]
    return cost


def teams_among(ranks: Ranks, size: int) -> list[Ranks]:
    """Return the runs of `size` neighbouring ranks, starting at a multiple of `size`, that lie wholly in `ranks`."""
    members = set(ranks)
    starts = (rank for rank in ranks if rank % size == 0)
    teams = (tuple(range(start, start + size)) for start in starts)
    return [team for team in teams if members.issuperset(team)]


def _shared(matrix: Matrix, size: int) -> Optional[Matrix]:
    """Return the matrix as a team's; None if no team fits, or if its iteration cannot be shared."""
    iteration = matrix.summed_iteration("gram")
    if matrix.parameter.equalization.rounds(matrix.rows, matrix.cols) > 1:  # an owner needs whole factors in between
        return None
    if iteration is None or not _has_teams(matrix.shards.layout, matrix.holders, size):
        return None
    cost = team_cost(matrix.size, len(matrix.parameter.schedule), len(iteration.windows), size)
    return replace(matrix, iteration=iteration, cost=cost, team_size=size)


@functools.lru_cache(maxsize=256)
def _has_teams(layout: Layout, holders: Ranks, size: int) -> bool:
    """Whether each copy has a team among its own ranks: then any copies that work together have one."""
    return all(teams_among(ranks, size) for ranks in layout.ranks_by_copy(holders))
