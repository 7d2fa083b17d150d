"""A matrix that a team of ranks works on together: its columns go to the members, those of the factor come back."""

from __future__ import annotations

from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.process_groups import explaining_timeouts, this_rank
from ..plan.teams import Team
from ..polar.factors import factor_of_parts
from .pipeline import advance


def team_factor(team: Team, packed: Optional[Tensor], eps: float, group: dist.ProcessGroup) -> Optional[Tensor]:
    """Return the polar factor of a team's matrix on its owner, and None on the other members.

    The owner passes the matrix as `packed` (1, m, n). All members must call it, and each waits for the others. How a
    sum is rounded depends on how many they are.
    """
    rows, cols = team.batch.packed_shape
    wide = packed if packed is None or rows <= cols else packed.mT
    part = _scattered(team, wide, group)
    counts = torch.zeros(1, dtype=torch.float64, device=part.device)
    sums = factor_of_parts(part, counts, team.matrix.iteration, eps)
    del part, wide
    goes_on, values = advance(sums)
    while goes_on:
        with explaining_timeouts("columns", team.matrix.parameter.name):
            dist.all_reduce(values, group=group)
        goes_on, values = advance(sums)
    factor, _ = values
    whole = _gathered(team, factor, group)
    return whole if whole is None or rows <= cols else whole.mT


def _scattered(team: Team, wide: Optional[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's columns (1, m, n_r) of the matrix that the owner has, `wide` (1, m, n)."""
    batch = team.batch
    m, device = min(batch.packed_shape), team.matrix.parameter.device
    part = torch.empty(1, m, team.width(this_rank()), dtype=batch.packed_dtype, device=device)
    sent, to, from_ = part.new_empty(0), [0] * len(team.ranks), [0] * len(team.ranks)
    from_[team.ranks.index(team.owner)] = part.numel()
    if wide is not None:
        sent = torch.cat([columns.reshape(-1) for columns in wide.split(team.widths, dim=-1)])
        to = [m * each for each in team.widths]
    with explaining_timeouts("columns", team.matrix.parameter.name):
        dist.all_to_all_single(part.view(-1), sent, from_, to, group=group)
    return part


def _gathered(team: Team, factor: Tensor, group: dist.ProcessGroup) -> Optional[Tensor]:
    """Return the whole (1, m, n) on the owner, from the columns (1, m, n_r) that each rank has; else None."""
    m, is_owner = factor.size(1), this_rank() == team.owner
    to, from_ = [0] * len(team.ranks), [m * width if is_owner else 0 for width in team.widths]
    to[team.ranks.index(team.owner)] = factor.numel()
    received = factor.new_empty(sum(from_))
    with explaining_timeouts("columns", team.matrix.parameter.name):
        dist.all_to_all_single(received, factor.reshape(-1), from_, to, group=group)
    if not is_owner:
        return None
    return torch.cat([part.view(1, m, -1) for part in received.split(from_)], dim=-1)
