"""The parameters that are not matrices: their part of the workspace, and their part of a step."""

from __future__ import annotations

from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..kernels.master_weights import joined, split_
from ..parameters.rates import decay_of, rate_of
from ..parameters.settings import Group
from ..parameters.state import REMAINDER, integers
from ..plan.layout import local_part
from ..plan.plan import FallbackBatch
from ..rules.fallback import FallbackRule, FallbackTensors
from ..rules.fallback_table import FALLBACKS, FallbackUpdate
from ..rules.scaling import GradientScaling, Scalings
from .local_matrix import StepTensors

# In the order of `FallbackTensors`.
FALLBACK_STATE = ("exp_avg", "exp_avg_sq", "step")

# Elements of which there are wider copies at once; only one parameter may have more. A master takes 8 bytes with its
# gradient, 12 with a GradScaler. Averages in half precision take 8 more.
WIDENED_AT_ONCE = 1 << 25


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
    dtypes = {tensors.parameters[0].dtype, tensors.averages[0].dtype, *map(attrgetter("dtype"), tensors.gradients)}
    if len(dtypes) == 1:
        update(tensors, rule, scaling)
        return
    for piece in _pieces(tensors.parameters):
        part = FallbackTensors(*(column[piece] for column in tensors))
        _update_widened_(update, part, None if remainders is None else remainders[piece], rule, scaling)


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


def _pieces(parameters: Sequence[Tensor]) -> Iterator[slice]:
    """Yield the parameters in runs of at most `WIDENED_AT_ONCE` elements, larger ones alone."""
    first, elements = 0, 0
    for i, p in enumerate(parameters):
        if i > first and elements + p.numel() > WIDENED_AT_ONCE:
            yield slice(first, i)
            first, elements = i, 0
        elements += p.numel()
    yield slice(first, len(parameters))


def _update_widened_(
    update: FallbackUpdate,
    tensors: FallbackTensors,
    remainders: Optional[Sequence[Tensor]],
    rule: FallbackRule,
    scaling: GradientScaling,
) -> None:
    """Take the step of tensors in unlike dtypes as float32 ones take it, or float64 ones if the parameters are.

    With the lower halves of bfloat16 parameters, `remainders`, nothing is rounded; what is in half precision is rounded
    once.
    """
    parameters, dtype = tensors.parameters, torch.promote_types(tensors.parameters[0].dtype, torch.float32)
    columns = [[t.to(dtype) for t in column] for column in tensors[1:4]]
    masters = [p.to(dtype) for p in parameters] if remainders is None else list(map(joined, parameters, remainders))
    update(FallbackTensors(masters, *columns, tensors.steps), rule, scaling)
    kept = [*zip(tensors[2:4], columns[1:])]
    if remainders is None:
        kept.append((parameters, masters))
    else:
        for parameter, remainder, master in zip(parameters, remainders, masters):
            split_(parameter, remainder, master)
    for targets, results in kept:
        if targets[0] is not results[0]:
            torch._foreach_copy_(targets, results)
