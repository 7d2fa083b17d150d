"""The parameters that are not matrices: their part of the workspace, and their part of a step."""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import Mapping, NamedTuple, Optional, Sequence

from torch import Tensor

from ..parameters.rates import decay_of, rate_of
from ..parameters.settings import Group
from ..parameters.state import FALLBACK_STATE, REMAINDER, integers
from ..plan.layout import local_part
from ..plan.plan import FallbackBatch
from ..rules.fallback import FallbackRule, FallbackTensors
from ..rules.fallback_table import FALLBACKS
from ..rules.scaling import Scalings
from ..rules.widened import update_widened_
from .local_matrix import StepTensors


class LocalFallback(NamedTuple):
    """A batch that the fallback updates: those of its parameters that have a state, which all but frozen ones have."""

    batch: FallbackBatch
    parameters: Sequence[Tensor]
    numbers: Sequence[int]  # of the parameters, among all of the optimizer
    state_indices: Sequence[int]  # of their states, in the optimizer's
    tensors: StepTensors

    def with_gradients(self) -> LocalFallback:
        """Return the batch with only those parameters that have a gradient in this step: itself if all have one."""
        absent = self.tensors.absent
        if absent.isdisjoint(self.numbers):
            return self
        present = [number not in absent for number in self.numbers]
        columns = self.parameters, self.numbers, self.state_indices
        return LocalFallback(self.batch, *(tuple(compress(column, present)) for column in columns), self.tensors)


def local_fallback(
    batch: FallbackBatch, group: Group, first_number: int, state_indices: Mapping[Tensor, int], tensors: StepTensors
) -> LocalFallback:
    """Return the part of the workspace of a batch of `group`, whose first parameter has `first_number`.

    `state_indices` says where in the optimizer's state that of a parameter is.
    """
    positions = [position for position in batch.positions if group["params"][position] in state_indices]
    parameters = [group["params"][position] for position in positions]
    numbers = [first_number + position for position in positions]
    return LocalFallback(batch, parameters, numbers, [state_indices[p] for p in parameters], tensors)


def update_fallback_(work: LocalFallback, group: Group, scalings: Scalings) -> None:
    """Update those parameters of a fallback batch that have a gradient, and their state."""
    work = work.with_gradients()
    sharers = work.batch.sharers
    if not work.parameters or sharers not in scalings:
        return
    scaling = scalings.on(sharers, work.parameters[0].device)
    rule, update = _fallback_rule(group), FALLBACKS[group["fallback"]].update
    tensors, remainders = _tensors_of(work)
    if remainders is None:
        update(tensors, rule, scaling)
    else:
        update_widened_(update, tensors, rule, scaling, remainders)


def _tensors_of(work: LocalFallback) -> tuple[FallbackTensors, Optional[list[Tensor]]]:
    """Return this process's tensors of a batch, and the lower halves of master weights, as integers, if it has them."""
    gradients, states = work.tensors.gradients, [work.tensors.states[i] for i in work.state_indices]
    local = list if work.batch.sharers is None else partial(map, local_part)
    columns = [work.parameters, [gradients[number] for number in work.numbers]]
    columns += ([state[key] for state in states] for key in FALLBACK_STATE)
    has_remainders = REMAINDER in states[0]
    remainders = [integers(each) for each in local([state[REMAINDER] for state in states])] if has_remainders else None
    return FallbackTensors(*(list(local(column)) for column in columns)), remainders


def _fallback_rule(group: Group) -> FallbackRule:
    betas, eps = group["adamw_betas"], group["adamw_eps"]
    return FallbackRule(rate_of(group), betas, eps, decay_of(group), group["maximize"], group["decay_mode"])
