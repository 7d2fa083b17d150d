"""Warnings of the first steps: an exchange that changes nothing, and parameters that ask for gradients and get none.

Usually the model trains others in place of such parameters.
"""

from __future__ import annotations

from typing import AbstractSet, NamedTuple, Sequence

from torch import Tensor

from ..parameters.names import listed, named_parameters
from ..parameters.settings import Group
from ..plan.exchange_options import ExchangeOptions, idle_exchange
from .gradients import Gradients

# An expert that gets no token for some steps is no mistake.
WATCHED_STEPS = 10

_NO_GRADIENT = (
    "no parameter of this optimizer has a gradient, so this step updates none (QK-clip may still scale heads). After "
    "fully_shard(model), load_state_dict(assign=True) or a move from the meta device a model has other parameters: "
    "make the optimizer after that. If none of this happened, call backward() before the step, or check whether all "
    "parameters are frozen. This warning is shown once"
)


class FirstSteps(NamedTuple):
    """What the first steps of an optimizer have seen."""

    count: int = 0
    untrained: AbstractSet[Tensor] = frozenset()  # parameters that asked for a gradient and had none in any of them
    warned: bool = False  # of a step without any gradient
    exchange_is_idle: bool = False  # a user's options change nothing, if there are other ranks by now

    def and_this(
        self, gradients: Gradients, params: Sequence[Tensor], groups: Sequence[Group]
    ) -> tuple[FirstSteps, list[str]]:
        """Return this with one more step, and warnings: of an idle exchange, of no gradient, of what stays untrained.

        Each is said once. `params` are all parameters of `groups`, in their order.
        """
        has_none = len(gradients.absent) == len(params)
        lines = idle_exchange(ExchangeOptions()) if self.exchange_is_idle else []
        lines += [_NO_GRADIENT] if has_none and not self.warned else []
        warned = self.warned or has_none
        if self.count == WATCHED_STEPS:
            return self._replace(warned=warned), lines
        waiting = {params[i] for i in gradients.absent if params[i].requires_grad}
        untrained = self.untrained & waiting if self.count else waiting
        if self.count + 1 < WATCHED_STEPS:
            return FirstSteps(self.count + 1, untrained, warned), lines
        names = [name for group in groups for name, p in named_parameters(group) if p in untrained]
        if 0 < len(names) < sum(p.requires_grad for p in params):  # that no step had any is said by the other line
            lines.append(_never_had_a_gradient(names))
        return FirstSteps(WATCHED_STEPS, warned=warned), lines


def _never_had_a_gradient(names: Sequence[str]) -> str:
    """Return a line about parameters that asked for a gradient and had none in the first `WATCHED_STEPS`."""
    return (
        f"{listed(names)}: no gradient in the first {WATCHED_STEPS} steps, so no step has changed them. If the model "
        "has other parameters in their place, as after fully_shard of some of its blocks, make the optimizer after "
        "that. If nothing uses them, say so by requires_grad_(False). If they get gradients later, nothing is wrong. "
        "This warning is shown once"
    )
