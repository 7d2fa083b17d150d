"""One step: momentum, orthogonalization and descent of matrices; the fallback's rule for the other parameters."""

from __future__ import annotations

from itertools import chain
from typing import Callable, Container, Iterator, Mapping, Optional, Sequence

from torch import Tensor

from ..kernels.master_weights import joined, split_
from ..parameters.rates import decay_of, rate_of
from ..parameters.settings import Group
from ..parameters.state import REMAINDER, integers
from ..plan.layout import layout_of, local_part
from ..plan.plan import FallbackBatch, State
from ..plan.process_groups import Ranks, group_of, this_rank
from ..plan.shards import local_rows
from ..rules.adamw import adamw_
from ..rules.descent import scale_rows_
from ..rules.fallback import FallbackRule, FallbackTensors
from ..rules.nadamw import nadamw_
from ..rules.scaling import GradientScaling
from .batch import UpdateNorms, update_local_
from .pipeline import advanced
from .recipe import Recipes
from .sharded import update_chunk_
from .summed import update_sum_
from .workspace import Workspace

FallbackUpdate = Callable[[FallbackTensors, FallbackRule, GradientScaling], None]

FALLBACK_UPDATES = {"adamw": adamw_, "nadamw": nadamw_}
# In the order of `FallbackTensors`.
FALLBACK_STATE = ("exp_avg", "exp_avg_sq", "step")

# Elements of masters that are in memory at once, each with its gradient in 8 bytes; only one parameter may have more.
MASTERS_AT_ONCE = 1 << 25


def update_shared_(workspace: Workspace, recipes: Recipes, in_flight: int) -> list[UpdateNorms]:
    """Update shared matrices of which any rank has a gradient, and those of this process while messages fly.

    Up to `in_flight` chunks have a message on its way while another is worked on. Returns norms as `update_local_`.
    """
    chunks = ([update_chunk_(work, recipes, group_of(ranks)) for work in works] for ranks, works in workspace.exchanges)
    sums = ([update_sum_(work, recipes, group_of(ranks)) for work in works] for ranks, works in workspace.sums)
    rounds = advanced(chain(chunks, sums), in_flight)
    results = next(rounds, [])  # the first parts are on their way
    norms = update_local_(workspace.batches, recipes)
    for ended in rounds:
        results += ended
    return norms + list(chain.from_iterable(results))


def update_fallback_(
    batch: FallbackBatch, group: Group, state: State, scalings: Mapping[Optional[Ranks], GradientScaling]
) -> None:
    """Update those parameters of a fallback batch that have a gradient, and their state."""
    every = [group["params"][position] for position in batch.positions]
    params = [p for p in every if p.grad is not None]
    if not params or batch.sharers not in scalings:  # on a mesh that this rank is not in
        return
    rule = _fallback_rule(group)
    states = [state[p] for p in params]
    keys = (*FALLBACK_STATE, REMAINDER) if REMAINDER in states[0] else FALLBACK_STATE
    tensors = params, [p.grad for p in params], *([entry[key] for entry in states] for key in keys)
    if batch.sharers is not None:
        tensors = [list(map(local_part, each)) for each in tensors]
    update = FALLBACK_UPDATES[group["fallback"]]
    if keys is FALLBACK_STATE:
        update(FallbackTensors(*tensors), rule, scalings[batch.sharers])
        return
    *tensors, remainders = tensors
    remainders = list(map(integers, remainders))
    for some in _pieces(tensors[0]):
        part = FallbackTensors(*(each[some] for each in tensors))
        _update_masters_(update, part, remainders[some], rule, scalings[batch.sharers])


def _fallback_rule(group: Group) -> FallbackRule:
    betas, eps = group["adamw_betas"], group["adamw_eps"]
    return FallbackRule(rate_of(group), betas, eps, decay_of(group), group["maximize"], group["decay_mode"])


def _pieces(parameters: Sequence[Tensor]) -> Iterator[slice]:
    """Yield the parameters in runs of at most `MASTERS_AT_ONCE` elements, larger ones alone."""
    first, elements = 0, 0
    for i, p in enumerate(parameters):
        if i > first and elements + p.numel() > MASTERS_AT_ONCE:
            yield slice(first, i)
            first, elements = i, 0
        elements += p.numel()
    yield slice(first, len(parameters))


def _update_masters_(
    update: FallbackUpdate,
    tensors: FallbackTensors,
    remainders: Sequence[Tensor],
    rule: FallbackRule,
    scaling: GradientScaling,
) -> None:
    """Take the step in float32 with bfloat16 parameters whose averages are float32: as float32 parameters would."""
    masters = list(map(joined, tensors.parameters, remainders))
    gradients = [gradient.float() for gradient in tensors.gradients]
    update(tensors._replace(parameters=masters, gradients=gradients), rule, scaling)
    for parameter, remainder, master in zip(tensors.parameters, remainders, masters):
        split_(parameter, remainder, master)


def scale_other_rows_(
    row_scales: Mapping[Tensor, Tensor],
    state: State,
    scaled: Container[Tensor],
    replica_ranks: Optional[Ranks],
    scalings: Mapping[Optional[Ranks], GradientScaling],
) -> None:
    """Apply QK-clip, in place, to what no batch has `scaled`: biases, of one element a row, and frozen weights."""
    for p, row_scale in row_scales.items():
        layout, local = layout_of("", p, replica_ranks), local_part(p)
        sharers = None if layout is None else layout.mesh.members
        if p not in scaled and sharers in scalings:  # else it is on a mesh that this rank is not in
            rest = state[p].get(REMAINDER) if p in state else None
            remainder = None if rest is None else integers(local_part(rest))
            rows, found_inf = local_rows(row_scale, layout, this_rank()), scalings[sharers].found_inf
            scale_rows_(local, rows, remainder, [found_inf])
