"""Teams: neighbouring ranks that work together on a matrix, where one rank would take longer than a step has to.

The owner hands each member some columns of the wide matrix; all sum their Gram matrices, and it gets its columns of the
polar factor back (`step/team.py`). The products with the long side are shared, those of m x m each member makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional, Sequence

from ..iteration import Iteration, summed_iteration
from .batches import Batch
from .costs import team_cost
from .matrix import Matrix
from .process_groups import Ranks


@dataclass(frozen=True, eq=False)
class Team:
    """A matrix that `ranks` work on together, seen from one of them; `owner` is one of them."""

    batch: Batch  # of the one matrix
    ranks: Ranks
    owner: int
    widths: tuple[int, ...]  # of each rank's columns of the wide matrix

    @property
    def matrix(self) -> Matrix:
        """The matrix."""
        return self.batch.matrices[0]


def with_teams(matrices: Sequence[Matrix], ranks_per_matrix: int) -> list[Matrix]:
    """Return `matrices` in their order, the most costly of them for teams, as far as that makes a step shorter.

    A step is as long as the larger of two: all work over all ranks, and the largest work of one. Sharing a matrix makes
    the second smaller and the first larger, as its m x m products are made by each member. All ranks decide alike.
    """
    shared = {matrix: _shared(matrix, ranks_per_matrix) for matrix in matrices} if ranks_per_matrix > 1 else {}
    ranks = max((len(matrix.parameter.sharers) for matrix in matrices), default=1)
    total = sum(matrix.cost for matrix in matrices)
    order = sorted((m for m in matrices if shared.get(m)), key=lambda m: -m.cost)
    single = max((matrix.cost for matrix in matrices if not shared.get(matrix)), default=0)
    best, chosen = max([total / ranks, *(m.cost for m in matrices)]), 0
    for count, matrix in enumerate(order, 1):
        total += shared[matrix].work - matrix.cost
        following = order[count].cost if count < len(order) else 0
        if following == matrix.cost:  # equal ones together
            continue
        largest = max([single, following, *(shared[m].cost for m in order[:count])])
        if max(total / ranks, largest) < best:
            best, chosen = max(total / ranks, largest), count
    taken = set(order[:chosen])
    return [shared[matrix] if matrix in taken else matrix for matrix in matrices]


def teams_among(ranks: Ranks, size: int) -> list[Ranks]:
    """Return the runs of `size` neighbouring ranks, beginning at a multiple of it, that are all among `ranks`."""
    members = set(ranks)
    starts = (rank for rank in ranks if rank % size == 0)
    teams = (tuple(range(start, start + size)) for start in starts)
    return [team for team in teams if members.issuperset(team)]


def _shared(matrix: Matrix, size: int) -> Optional[Matrix]:
    """Return the matrix as a team's, None where there is none for it, or its iteration cannot be shared.

    A team is among the ranks of one copy, so that it stays one whichever copies work together.
    """
    copies: dict[tuple[int, ...], list[int]] = {}
    for rank in matrix.holders:
        copies.setdefault(matrix.shards.layout.copy_of(rank), []).append(rank)
    iteration = _iteration(matrix)
    if iteration is None or not all(teams_among(tuple(ranks), size) for ranks in copies.values()):
        return None
    m, n = sorted((matrix.rows, matrix.cols))
    cost = team_cost((m, n), len(matrix.parameter.schedule), len(iteration.windows), size)
    return replace(matrix, iteration=iteration, cost=cost, team_size=size)


def _iteration(matrix: Matrix) -> Optional[Iteration]:
    parameter, size = matrix.parameter, sorted((matrix.rows, matrix.cols))
    return summed_iteration(parameter.device, parameter.work_dtype, tuple(size), parameter.schedule, "gram")
