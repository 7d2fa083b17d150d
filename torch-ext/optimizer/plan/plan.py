"""The plan: everything about a step that depends only on parameters, settings and ranks, made once and frozen."""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence, Union

import torch

from ..iteration import choose_iteration, default_work_dtype
from ..kernels.formats import float32_roundoffs
from ..kernels.products import triton_fault
from ..kernels.speeds.machine import key_of
from ..kernels.speeds.measurements import changed, failed
from ..parameters.matrices import moments_in_group, view_in_group
from ..parameters.names import bare_name, named_parameters
from ..parameters.rates import live_tensors
from ..parameters.sequences import grouped
from ..parameters.settings import PLANNED, STACKED, Group, keeps_norm
from ..parameters.state import BUFFER, State
from ..rules.equalization import Equalization
from ..schedules import resolve_schedule
from ..tuning.contest import tasks_of
from .batches import Batch, Chain, chains, plan_batches
from .exchange_options import ExchangeOptions
from .exchanges import Chunk, Exchange, plan_exchanges
from .gram_sums import SummedBatch, as_summed, plan_sums
from .layout import layout_of, local_part
from .matrix import Matrix, Parameter
from .process_groups import Ranks, this_rank
from .shards import check_shards, shards_of
from .teams import Team
from .terms import Terms, terms_of

_STACKED_OF, _PLANNED_OF = itemgetter(*STACKED), itemgetter(*PLANNED)


@dataclass(frozen=True, eq=False)
class FallbackBatch:
    """Parameters of one fallback group that are updated in one call: they share device, dtype and sharers."""

    group: int
    positions: tuple[int, ...]  # in the group
    sharers: Optional[Ranks]


class SharedWork(NamedTuple):
    """Who orthogonalizes a matrix that ranks share."""

    owner: Union[int, str]  # a rank; "all" if they sum its Gram matrix
    described: str  # how several ranks work on it; "" if the owner works alone


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step follows: numbers and records, no tensors."""

    matrices: tuple[tuple[Matrix, ...], ...] = ()  # for each of Muon's parameters
    batches: tuple[Batch, ...] = ()  # on which this process works alone
    exchanges: tuple[Exchange, ...] = ()
    sums: tuple[tuple[SummedBatch, ...], ...] = ()  # grouped by the ranks that sum
    fallback: tuple[FallbackBatch, ...] = ()
    terms: Mapping[Ranks, Terms] = field(default_factory=dict)  # for each set of ranks that shares with this one

    def shared_work(self) -> dict[tuple[int, int], SharedWork]:
        """Return who orthogonalizes each matrix that ranks work on for each other, by the matrix's key."""
        work = {}
        for matrix, (owner, *others) in itertools.chain(*(chunk.messages.assignments for chunk in self._chunks)):
            described = f"{matrix.iteration}, by {1 + len(others)} ranks together" if others else ""
            work[matrix.key] = SharedWork(owner, described)
        for batch in itertools.chain(*self.sums):
            work.update({matrix.key: SharedWork("all", str(batch)) for matrix in batch.matrices})
        return work

    def teams(self) -> list[Team]:
        """Return the teams that this rank works in, one for each matrix that it shares."""
        return [team for chunk in self._chunks for team, _ in chunk.teams]

    def local_chains(self) -> tuple[Chain, ...]:
        """Return the chains of batches on which this process works alone."""
        return chains(self.batches)

    def chains(self) -> list[Chain]:
        """Return all chains of batches that this process orthogonalizes."""
        owned = [tuple(each.batch for each in chain) for chunk in self._chunks for chain in chunk.chains]
        return [*self.local_chains(), *owned]

    @property
    def _chunks(self) -> list[Chunk]:
        return [chunk for exchange in self.exchanges for chunk in exchange.chunks]


def make_plan(
    groups: Sequence[Group], state: State, options: ExchangeOptions, replica_ranks: Optional[Ranks], common_line: str
) -> Plan:
    """Return the plan for the parameters of `groups`.

    `replica_ranks` have a copy of every plain parameter. Parameters without `state` are frozen. `common_line` is what
    ranks compare besides parameters and settings. Raises ValueError for parameters that cannot be planned.
    """
    local: list[Matrix] = []
    exchanged: list[Matrix] = []
    summed: list[Matrix] = []
    choose = functools.lru_cache(maxsize=None)(choose_iteration)
    matrices = []
    for parameter, frozen in _parameters(groups, state, replica_ranks):
        its_matrices = parameter.matrices(groups[parameter.group], choose)
        matrices.append(its_matrices)
        if frozen or not parameter.is_here:
            continue
        owned = [matrix for matrix in its_matrices if matrix.has_owner]
        sums = {matrix: as_summed(matrix) for matrix in owned} if options.sum_gram else {}
        summed += filter(None, sums.values())
        exchanged += [matrix for matrix in owned if not sums.get(matrix)]
        local += [its_matrices[index] for index in local_indices(parameter) if not its_matrices[index].has_owner]
    exchanges, repeated = plan_exchanges(exchanged, this_rank(), options)
    failed_here = failures([*itertools.chain(*matrices), *summed])
    return Plan(
        matrices=tuple(matrices),
        batches=plan_batches(sorted([*local, *repeated], key=lambda matrix: matrix.key)),
        exchanges=exchanges,
        sums=plan_sums(summed, this_rank(), options.chunk_bytes),
        fallback=tuple(_fallback_batches(groups, replica_ranks)),
        terms=terms_of(groups, common_line, stack_groups(groups), failed_here, replica_ranks, state),
    )


def choices() -> tuple[int, int, tuple[float, float]]:
    """Return numbers that change whenever the choice of iterations may change.

    The first counts changes of measurements; the second is the number of CPU threads, for which measurements hold; the
    third is how much torch rounds the factors of float32 products, on CUDA devices and elsewhere.
    """
    return changed(), torch.get_num_threads(), float32_roundoffs()


def failures(matrices: Iterable[Matrix]) -> dict[Ranks, str]:
    """Return, for each set of ranks, a line about candidate kernels of their matrices that have failed here."""
    tried: dict[Ranks, set[tuple]] = {}
    for matrix in matrices:
        if matrix.parameter.sharers is not None:
            tried.setdefault(matrix.parameter.sharers, set()).add(matrix.measured_as)
    return {ranks: f"failed here: {', '.join(sorted(_failed(kinds))) or 'nothing'}" for ranks, kinds in tried.items()}


def stack_groups(groups: Sequence[Group]) -> list[int]:
    """Return, for each group, the number of the first group whose matrices may share batches with its matrices."""
    values = list(map(_STACKED_OF, groups))
    return [values.index(value) for value in values]


def planned_settings(groups: Sequence[Group]) -> list[tuple[Any, ...]]:
    """Return the settings of each group on which the plan depends, and the devices of those that are tensors.

    Of live settings only equality between groups matters: if momentum rises equally in all groups, the plan stays.
    """
    return [
        (number, *_PLANNED_OF(group), *(value.device for value in live_tensors(group)))
        for number, group in zip(stack_groups(groups), groups)
    ]


def local_indices(parameter: Parameter) -> Sequence[int]:
    """Return the indices of a parameter's matrices that this rank has a part of, perhaps an empty one, in order."""
    if parameter.shards is None:
        return range(len(parameter.view.shapes))
    return parameter.shards.local(this_rank())[1]


def _failed(kinds: Iterable[tuple]) -> set[str]:
    tasks = {(task.need.kernel, task.need.dtype, task.device) for kind in kinds for task in tasks_of(*kind, 1)}
    wrong = {f"{kernel} {dtype} {name}" for kernel, dtype, at in tasks for name in failed(key_of(at), kernel, dtype)}
    return wrong | {f"Triton ({fault})" for fault in map(triton_fault, {device for device, *_ in kinds}) if fault}


def _parameters(
    groups: Sequence[Group], state: State, replica_ranks: Optional[Ranks]
) -> Iterator[tuple[Parameter, bool]]:
    """Yield each of Muon's parameters, and whether it is frozen."""
    numbers = itertools.count()
    for i, (group, stack_group) in enumerate(zip(groups, stack_groups(groups))):
        if not group["use_muon"]:
            continue
        schedule = resolve_schedule(group["ns_coefficients"], group["ns_steps"])
        for position, (name, p) in enumerate(named_parameters(group)):
            view, layout = view_in_group(name, p, group), layout_of(name, p, replica_ranks)
            shards = None if layout is None else shards_of(view, layout)
            if shards is not None:
                check_shards(name, shards)
            # A frozen parameter has no momentum yet. When it gets one, it will be like the parameter.
            momentum = state[p][BUFFER] if p in state else p
            parameter = Parameter(
                number=next(numbers),
                name=name,
                seed=_seed_of(name),
                group=i,
                position=position,
                stack_group=stack_group,
                schedule=schedule,
                view=view,
                shards=shards,
                device=p.device,
                dtype=p.dtype,
                momentum_dtype=momentum.dtype,
                work_dtype=_work_dtype(group) or default_work_dtype(p),
                equalization=Equalization(group["equalize"], group["renormalize"]),
                moments_view=moments_in_group(name, p, group),
                keeps_norm=keeps_norm(group),
                offloaded=group["offload"],
            )
            yield parameter, not p.is_meta and p not in state


def _work_dtype(group: Group) -> Optional[torch.dtype]:
    """Return the work dtype that a group asks for, None where it leaves it to the device."""
    return None if group["ns_dtype"] is None else getattr(torch, group["ns_dtype"])


def _seed_of(name: str) -> int:
    digest = hashlib.blake2b(bare_name(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _fallback_batches(groups: Sequence[Group], replica_ranks: Optional[Ranks]) -> Iterator[FallbackBatch]:
    """Yield the batches of the groups that the fallback updates."""
    for number, group in enumerate(groups):
        if group["use_muon"]:
            continue
        keys = []
        for name, p in named_parameters(group):
            layout = layout_of(name, p, replica_ranks)
            keys.append((None if layout is None else layout.mesh.members, local_part(p).device, p.dtype))
        for positions in grouped(range(len(keys)), keys.__getitem__):
            yield FallbackBatch(number, tuple(positions), keys[positions[0]][0])
