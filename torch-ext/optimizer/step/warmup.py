"""Work before the first step, which would otherwise wait for it: connecting ranks and compiling kernels.

A stage is a function that returns in words what it did. Stages come in phases. A phase makes its stages when its turn
comes, because what is compiled depends on what an earlier phase has measured.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist

from ..iteration import Iteration
from ..kernels.autocast import without_autocast
from ..parameters.settings import Group
from ..plan.batches import Chain
from ..plan.exchanges import Exchange
from ..plan.matrix import Matrix
from ..plan.plan import Plan
from ..plan.process_groups import Ranks, all_reduce_sum_, explaining_timeouts, group_of, this_rank
from ..polar.factors import factor_of_parts
from ..tuning.progress import Progress
from ..tuning.tune import Stage
from .graphs import BatchToPack, kinds_of
from .pipeline import advance
from .polar_update import Packed, packed_memory, polar_updates

Phase = Callable[[], Iterable[Stage]]


class Columns(NamedTuple):
    """This rank's columns of wide matrices that several ranks orthogonalize together, as a step has them."""

    shape: tuple[int, int, int]
    tall: bool  # a view of rows of tall matrices
    dtype: torch.dtype
    device: torch.device
    iteration: Iteration
    eps: float

    def __str__(self) -> str:
        return f"this rank's columns {' x '.join(map(str, self.shape))} {self.iteration}"


def warm_up(phases: Sequence[Phase], progress: Progress) -> None:
    """Run the stages of all phases; `progress(done, total, what)` is called after each.

    All ranks that share parameters must call it. The total counts later phases as they look at that time.
    """
    done = 0
    for number, phase in enumerate(phases, 1):
        stages, after = list(phase()), sum(len(list(later())) for later in phases[number:])
        for left, stage in zip(reversed(range(len(stages))), stages):
            what = stage()
            done += 1
            progress(done, done + left + after, what)


def connect_stages(plan: Plan) -> Iterator[Stage]:
    """Yield a stage for each communicator of a step, which sends a few bytes; all ranks have the same order."""
    for ranks, terms in sorted(plan.terms.items()):
        yield partial(_told, f"connect {len(ranks)} ranks that share parameters", _reduce_a_number, ranks, terms.device)
    for exchange in plan.exchanges:
        yield partial(_told, f"connect {len(exchange.ranks)} ranks that exchange matrices", _exchange_a_byte, exchange)
    for ranks, device in {team.ranks: team.matrix.parameter.device for team in plan.teams()}.items():
        yield partial(_told, f"connect {len(ranks)} ranks that share matrices", _reduce_a_number, ranks, device)
    for batches in plan.sums:
        ranks, device = batches[0].ranks, batches[0].first.parameter.device
        yield partial(_told, f"connect {len(ranks)} ranks that sum Gram matrices", _reduce_a_number, ranks, device)


def compile_stages(plan: Plan, groups: Sequence[Group]) -> Iterator[Stage]:
    """Yield a stage for each kind of work on matrices, which compiles its kernels by a run on zeros."""
    # Chains that differ only in eps, or in how many matrices they have, are compiled once.
    chains = {kinds_of(BatchToPack(batch, 1, 0.0) for batch in chain): chain for chain in plan.chains()}
    for chain in chains.values():
        what = " with ".join(f"{len(b.matrices)} x {b.first.rows} x {b.first.cols} {b.iteration}" for b in chain)
        yield partial(_told, what, _orthogonalize_zeros, chain, groups)
    for columns in dict.fromkeys(_columns(plan, groups)):
        yield partial(_told, str(columns), _orthogonalize_zero_columns, columns)


def _told(what: str, run: Callable[..., None], *arguments: Any) -> str:
    run(*arguments)
    return what


def _reduce_a_number(ranks: Ranks, device: torch.device) -> None:
    all_reduce_sum_(torch.zeros(1, dtype=torch.int64, device=device), ranks, "warm-up")


def _exchange_a_byte(exchange: Exchange) -> None:
    """Let each rank send a byte to each other rank, because the first message between two ranks connects them."""
    chunk = exchange.chunks[0]
    sent = torch.zeros(len(exchange.ranks), dtype=torch.uint8, device=chunk.first.parameter.device)
    group = group_of(exchange.ranks, chunk.names)
    with explaining_timeouts("warm-up", chunk.names):
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def _orthogonalize_zeros(chain: Chain, groups: Sequence[Group]) -> None:
    members = []
    for batch in chain:
        zeros = packed_memory(batch, len(batch.matrices)).zero_()
        members.append(Packed(batch, groups[batch.first.parameter.group]["eps"], zeros, None))
    with without_autocast(chain[0].device.type):
        polar_updates(members)


def _columns(plan: Plan, groups: Sequence[Group]) -> Iterator[Columns]:
    """Yield the columns of each team and of each batch whose Gram matrices are summed."""

    def columns(matrix: Matrix, count: int, width: int, tall: bool) -> Columns:
        parameter, shape = matrix.parameter, (count, min(matrix.size), width)
        eps = groups[parameter.group]["eps"]
        return Columns(shape, tall, parameter.packed_dtype, parameter.device, matrix.iteration, eps)

    for team in plan.teams():
        yield columns(team.matrix, 1, team.width(this_rank()), False)
    for batch in itertools.chain(*plan.sums):
        yield columns(batch.first, len(batch.matrices), batch.rows if batch.tall else batch.cols, batch.tall)


def _orthogonalize_zero_columns(columns: Columns) -> None:
    """Run what a step runs between its messages; nothing is sent, because sums of zeros are zeros."""
    count, m, width = columns.shape
    shape = (count, width, m) if columns.tall else columns.shape
    zeros = torch.zeros(shape, dtype=columns.dtype, device=columns.device)
    counts = torch.zeros(count, dtype=torch.float64, device=columns.device)
    with without_autocast(columns.device.type):
        sums = factor_of_parts(zeros.mT if columns.tall else zeros, counts, columns.iteration, columns.eps)
        while advance(sums)[0]:
            pass
