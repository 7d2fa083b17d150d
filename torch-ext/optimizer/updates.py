"""Settings of groups become rules, and their parameters the lists that rules work on."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from types import MappingProxyType
from typing import Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence

from torch import Tensor

from .claims import Claims, Group, Ranks
from .distributed.agreement import Accord, check_agreement
from .distributed.exchange_plan import Exchange
from .distributed.pipeline import Gradients, LocalMatrix, Recipe, run_pipeline, update_batch_
from .distributed.placement import group_of, layout_of, local_part, this_rank
from .distributed.plan import Batch, Matrix, Planned, positions_by
from .distributed.sharded import update_chunk
from .distributed.shards import Sheet, local_rows
from .distributed.summed import SummedBatch, update_summed
from .offload import HostChunks
from .parameters import HALVES, GradientScaling
from .rules.adamw import adamw_
from .rules.descent import descent_rule
from .rules.fallback import FallbackRule, FallbackState
from .rules.momentum import MomentumRule
from .rules.nadamw import nadamw_
from .rules.qk_clip import scaled_rows
from .telemetry import SeenBatch, SeenGroup, as_it_is

State = Mapping[Tensor, Mapping[str, Tensor]]


class Hosted(NamedTuple):
    """Where the momentum of a batch lives, if in host memory: the chunk of its buffers, and whose they are."""

    host: HostChunks
    chunk: int
    members: Sequence[Matrix]


class Plan(NamedTuple):
    """Muon's parameters with their groups and sheets, the batches of this process, and what is exchanged."""

    matrices: Sequence[tuple[Tensor, Group, Sheet]] = ()
    planned: Sequence[Planned] = ()  # for each of them
    batches: Sequence[Batch] = ()
    exchanges: Sequence[Exchange] = ()
    sums: Sequence[Sequence[SummedBatch]] = ()  # those of the same ranks together
    claims: Mapping[Ranks, Claims] = MappingProxyType({})  # of ranks that share parameters
    holders: Mapping[Tensor, Ranks] = MappingProxyType({})  # of the parameters that several ranks share
    hosted: Mapping[Batch, Hosted] = MappingProxyType({})  # of those of `batches` whose momentum is in host memory

    def synchronize(self) -> None:
        """Wait until host memory has all momentum that lives there."""
        for host in {id(own.host): own.host for own in self.hosted.values()}.values():
            host.synchronize()

    def check_agreement(self) -> None:
        """Raise ValueError unless all ranks that share parameters have the same plan for them; all must call it."""
        for ranks, claims in sorted(self.claims.items()):
            check_agreement(ranks, claims.with_settings(), local_part(claims.parameters[0]).device)

    def agree(self, scaling: GradientScaling) -> tuple[dict[Optional[Ranks], GradientScaling], dict[Ranks, Accord]]:
        """Return `scaling` as the ranks that share parameters agree about it, and how they did; all must call it.

        Gradients overflow for all of them or for none. The scaling of None is for this process alone.
        """
        scalings: dict[Optional[Ranks], GradientScaling] = {None: scaling}
        accords = {}
        for ranks, claims in sorted(self.claims.items()):
            accords[ranks] = Accord(claims.settings(), claims.names)
            overflow = accords[ranks].agree(ranks, scaling.found_inf, local_part(claims.parameters[0]).device)
            scalings[ranks] = scaling._replace(found_inf=overflow)
        return scalings, accords

    def owners(self) -> dict[Matrix, int]:
        """Return the rank that orthogonalizes each exchanged matrix."""
        chunks = (chunk.messages for exchange in self.exchanges for chunk in exchange.chunks)
        return dict(owner for messages in chunks for owner in messages.owners)

    def summed(self) -> dict[Matrix, SummedBatch]:
        """Return the batch of each matrix whose Gram matrix is summed."""
        return {matrix: batch for batches in self.sums for batch in batches for matrix in batch.members}

    def all_batches(self) -> list[Batch]:
        """Return every batch that this process orthogonalizes."""
        chunks = (chunk for exchange in self.exchanges for chunk in exchange.chunks)
        return [*self.batches, *(owned.batch for chunk in chunks for owned in chunk.batches)]


def plan_hosted(
    batches: Iterable[Batch], matrices: Sequence[tuple[Tensor, Group, Sheet]], state: State
) -> dict[Batch, Hosted]:
    """Return the batches whose momentum `state` has in host memory, in chunks that each device fetches in turn.

    Parameters without state, frozen ones, are left out.
    """
    hosted = [batch for batch in batches if matrices[batch.members[0].parameter][1]["offload"]]
    members = [[matrix for matrix in batch.members if matrices[matrix.parameter][0] in state] for batch in hosted]
    cut: dict[int, list[Tensor]] = {}
    for number in {matrix.parameter for own in members for matrix in own}:
        p, _, sheet = matrices[number]
        cut[number] = sheet.local.matrices(state[p]["momentum_buffer"])
    found = {}
    devices = [matrices[batch.members[0].parameter][0].device for batch in hosted]
    for positions in positions_by(devices):
        chunks = [[cut[matrix.parameter][matrix.index] for matrix in members[i]] for i in positions]
        host = HostChunks(chunks, devices[positions[0]])
        found.update({hosted[i]: Hosted(host, chunk, members[i]) for chunk, i in enumerate(positions)})
    return found


class Given(NamedTuple):
    """What a step is given besides parameters and gradients."""

    state: Mapping[Tensor, Mapping[str, Tensor]]
    row_scales: Mapping[Tensor, Tensor]  # a factor for each row of the whole, of some parameters
    scalings: Mapping[Optional[Ranks], GradientScaling]  # by the ranks that share a parameter
    accords: Mapping[Ranks, Accord]  # likewise
    release_grads: bool = False


def update_matrices_(plan: Plan, given: Given, in_flight: int) -> list[SeenBatch]:
    """Update the matrices of `plan` and their momentum, with up to `in_flight` chunks of them on their way at a time.

    Those of this process are updated where they have a gradient, exchanged ones where any rank has one. Returns what
    was seen of those worked on here.
    """
    parts: dict[Matrix, LocalMatrix] = {}
    for number, (p, group, sheet) in enumerate(plan.matrices):
        parts.update(_parts(number, p, group, sheet, given))
    seen: list[SeenBatch] = []
    worked: list[tuple[Batch | SummedBatch, Tensor]] = []

    def chunks_of(exchange: Exchange) -> Iterator[Iterator[None]]:
        for chunk in exchange.chunks:
            # Who neither holds nor owns any of a chunk forwards nothing, and needs a recipe of the same kind only.
            members = chunk.messages.held or [chunk.messages.owners[0][0]]
            recipe, accord = _recipe(plan, members, given, exchange.holders), given.accords[exchange.holders]
            yield update_chunk(chunk, parts, recipe, accord, group_of(exchange.ranks), worked)

    def sums_of(batches: Sequence[SummedBatch]) -> Iterator[Iterator[None]]:
        for batch in batches:
            recipe = _recipe(plan, batch.members, given, batch.holders)
            yield update_summed(batch, parts, recipe, group_of(batch.ranks), worked)

    exchanges = chain(map(chunks_of, plan.exchanges), map(sums_of, plan.sums))
    run_pipeline(exchanges, in_flight, lambda: _update_local_(plan, parts, given, seen))
    for batch, norms in worked:
        seen.append(_seen(batch, norms, _recipe(plan, batch.members, given, None)))
    return seen


def _update_local_(plan: Plan, parts: Mapping[Matrix, LocalMatrix], given: Given, seen: list[SeenBatch]) -> None:
    recipes: dict[tuple[int, ...], Recipe] = {}  # of batches whose members are of the same groups
    for batch in plan.batches:
        here = [matrix for matrix in batch.members if matrix in parts]
        if not here:
            continue
        scaling = given.scalings[plan.holders.get(plan.matrices[here[0].parameter][0])]
        present = [matrix for matrix in here if parts[matrix].gradients is not None]
        for part in (parts[matrix] for matrix in here if parts[matrix].gradients is None):
            if part.row_scale is not None:  # QK-clip holds for what nobody updates, too
                part.parameter.copy_(scaled_rows(part.parameter, part.row_scale, scaling.found_inf))
        if not present:
            continue
        groups = [plan.matrices[matrix.parameter][1] for matrix in present]
        key = (id(scaling), *map(id, groups))
        if key not in recipes:
            recipes[key] = recipe_of(groups, scaling)
        own, hosted = [parts[matrix] for matrix in present], plan.hosted.get(batch)
        with nullcontext() if hosted is None else hosted.host.borrowed(hosted.chunk) as buffers:
            if hosted is not None:
                fetched = dict(zip(hosted.members, buffers))
                own = [part._replace(buffer=fetched[matrix]) for part, matrix in zip(own, present)]
            norms = update_batch_(batch, own, recipes[key])
        seen.append(_seen(batch, norms, recipes[key]))


def _seen(batch: Batch | SummedBatch, norms: Tensor, recipe: Recipe) -> SeenBatch:
    rule = recipe.descent._replace(multiplier=batch.multiplier)
    return SeenBatch(norms, len(norms) * batch.rows * batch.cols, rule)


def _recipe(plan: Plan, members: Sequence[Matrix], given: Given, holders: Optional[Ranks]) -> Recipe:
    return recipe_of([plan.matrices[matrix.parameter][1] for matrix in members], given.scalings[holders])


def recipe_of(groups: Sequence[Group], scaling: GradientScaling) -> Recipe:
    """Return the recipe of a batch whose members are of `groups`, which may differ in lr and weight decay alone."""
    first = groups[0]
    own = groups[:1] if all(group is first for group in groups) else groups
    # A tensor of a group's own is changed by schedulers where it is, and metrics are of the step that they saw.
    rates, decays = [as_it_is(g["lr"]) for g in own], [g["weight_decay"] for g in own]
    return Recipe(
        MomentumRule(first["momentum"], first["nesterov"], first["maximize"]),
        first["eps"],
        descent_rule(rates, decays, first["decay_mode"]),
        scaling,
    )


def update_fallback_(group: Group, plan: Plan, given: Given) -> SeenGroup:
    """Update the parameters of a group that is not Muon's and that have a gradient, and their state."""
    params = [p for p in group["params"] if p.grad is not None]
    update_ = {"adamw": adamw_, "nadamw": nadamw_}[group["fallback"]]
    rule = FallbackRule(group["lr"], group["adamw_betas"], group["adamw_eps"], group["weight_decay"], group["maximize"])
    local = [local_part(p) for p in params]
    keys = [(own.device, own.dtype, plan.holders.get(p)) for p, own in zip(params, local)]
    for members in positions_by(keys):
        states = [given.state[params[i]] for i in members]
        states = [FallbackState(*(local_part(own[key]) for key in ("exp_avg", "exp_avg_sq", "step"))) for own in states]
        gradients = [local_part(params[i].grad) for i in members]
        update_([local[i] for i in members], gradients, states, rule, given.scalings[keys[members[0]][2]])
    return SeenGroup(group, params, as_it_is(group["lr"]))


def scale_rows_(p: Tensor, plan: Plan, given: Given) -> None:
    """Multiply each row of `p`, in place, with its factor; a bias has one element a row."""
    ranks = plan.holders.get(p)
    own, layout = local_part(p), layout_of("", p, ranks)
    own.copy_(scaled_rows(own, local_rows(given.row_scales[p], layout, this_rank()), given.scalings[ranks].found_inf))


def _parts(number: int, p: Tensor, group: Group, sheet: Sheet, given: Given) -> Iterator[tuple[Matrix, LocalMatrix]]:
    """Yield this rank's parts of a parameter's matrices, cut alike from it and from its momentum buffer."""
    if p not in given.state:  # frozen, and without a gradient
        return
    view, buffer = sheet.local, local_part(given.state[p]["momentum_buffer"])
    gradients = None if p.grad is None else Gradients(p, view, given.release_grads)
    row_scale = given.row_scales.get(p)
    if row_scale is not None and sheet.shards is not None:
        row_scale = local_rows(row_scale, sheet.shards.layout, this_rank())
    pieces = zip(view.matrices(local_part(p)), view.matrices(buffer))
    scales = [None] * len(sheet.indices) if row_scale is None else view.row_values(row_scale)
    rounds = group["stochastic_rounding"] and p.dtype in HALVES
    # A seed for each matrix and step: 2**20 matrices a parameter, 2**20 parameters, and 2**23 steps.
    first = (group["rounding_step"] << 40) + (number << 20)
    for position, (index, (own, average), scale) in enumerate(zip(sheet.indices, pieces, scales)):
        if own.numel():
            part = LocalMatrix(own, average, gradients, position, scale)
            if rounds:
                part = part._replace(seed=first + index, origin=_origin(sheet, index))
            yield Matrix(number, index), part
    if given.release_grads and not local_part(p).numel():  # as the other ranks, whose parts are read, do
        p.grad = None


def _origin(sheet: Sheet, index: int) -> tuple[int, int, int]:
    """Return the first row and column of this rank's part of a matrix, and how many columns the whole has."""
    part = (0, 0) if sheet.shards is None else sheet.shards.part(index, this_rank()).origin()
    return (*part, sheet.whole.cols)
