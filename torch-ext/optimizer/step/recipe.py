"""Recipes: the rules of one step, read from the live settings of groups."""

from __future__ import annotations

from typing import NamedTuple, Sequence, Union

from torch import Tensor

from ..parameters.rates import rate_of
from ..parameters.settings import Group
from ..plan.matrix import Matrix, Parameter
from ..rules.descent import DescentRule, descent_rule
from ..rules.momentum import MomentumRule
from ..rules.scaling import GradientScaling, Scalings
from .graphs import UpdateGraphs


class Recipe(NamedTuple):
    """The rules of a step for the matrices of one batch, before and after orthogonalization."""

    momentum: MomentumRule
    eps: float
    descent: DescentRule
    second_moment_beta: float
    scaling: GradientScaling


class Recipes:
    """The recipes of one step, each made once, its `scalings`, and the `graphs` that may take the middle of it."""

    def __init__(
        self,
        groups: Sequence[Group],
        scalings: Scalings,
        graphs: UpdateGraphs,
    ):
        self.groups = groups
        self.scalings = scalings
        self.graphs = graphs
        self._made: dict[tuple, Recipe] = {}

    def of(self, matrices: Sequence[Matrix]) -> Recipe:
        """Return the recipe of matrices of one batch, whose groups may differ in learning rate and decay alone."""
        return self.of_groups(group_numbers(matrices), matrices[0].parameter)

    def of_groups(self, numbers: tuple[int, ...], parameter: Parameter) -> Recipe:
        """Return the recipe of matrices by their `group_numbers`; `parameter` is that of one of them."""
        key = (numbers, parameter.sharers, parameter.device)
        if key not in self._made:
            scaling = self.scalings.on(parameter.sharers, parameter.device)
            self._made[key] = self._recipe([self.groups[number] for number in numbers], scaling)
        return self._made[key]

    def _recipe(self, groups: Sequence[Group], scaling: GradientScaling) -> Recipe:
        first = groups[0]
        # Metrics, which read the rate later, are of the step that used it.
        rates, decays = [snapshot(rate_of(group)) for group in groups], [group["weight_decay"] for group in groups]
        largest = [group["decay_lr"] for group in groups]
        return Recipe(
            MomentumRule(first["momentum"], first["nesterov"], first["maximize"]),
            first["eps"],
            descent_rule(rates, decays, first["decay_mode"], largest),
            first["second_moment_beta"],
            scaling,
        )


def group_numbers(matrices: Sequence[Matrix]) -> tuple[int, ...]:
    """Return the number of each matrix's group, or a single number if all have the same."""
    numbers = tuple(matrix.parameter.group for matrix in matrices)
    return numbers[:1] if len(set(numbers)) == 1 else numbers


def snapshot(value: Union[float, Tensor, None]) -> Union[float, Tensor, None]:
    """Return a copy of a 0-d tensor, since schedulers and scalers change theirs in place; a number as it is."""
    return value.clone() if isinstance(value, Tensor) else value
