"""Recipes: the rules of one step for each batch, read from the live settings of groups."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..parameters.rates import decay_of, rate_of
from ..parameters.settings import Group
from ..plan.matrix import Matrix
from ..plan.process_groups import Ranks
from ..rules.descent import DescentRule, descent_rule
from ..rules.momentum import MomentumRule
from ..rules.scaling import GradientScaling, Scalings
from .graphs import UpdateGraphs


class RecipeKey(NamedTuple):
    """What the recipe of some matrices follows from, besides live settings."""

    group_numbers: tuple[int, ...]  # of each matrix, or a single one if all have the same
    sharers: Optional[Ranks]
    device: torch.device


class Recipe(NamedTuple):
    """The rules of a step for the matrices of one batch, before and after orthogonalization."""

    momentum: MomentumRule
    eps: float
    descent: DescentRule
    second_moment_beta: float
    scaling: GradientScaling
    groups: Sequence[Group]  # all, by number


class StepContext:
    """What is known when a step begins: live settings, scalings, and the `graphs` that may replace its middle."""

    def __init__(self, groups: Sequence[Group], scalings: Scalings, graphs: UpdateGraphs):
        self.scalings = scalings
        self.graphs = graphs
        self._groups = groups
        self._recipes: dict[RecipeKey, Recipe] = {}

    def recipe(self, key: RecipeKey) -> Recipe:
        """Return the recipe of matrices with this key, which is made once in a step."""
        if key not in self._recipes:
            self._recipes[key] = self._recipe(key)
        return self._recipes[key]

    def _recipe(self, key: RecipeKey) -> Recipe:
        groups = [self._groups[number] for number in key.group_numbers]
        first = groups[0]
        # Metrics read the rate later, and must report the one used here.
        rates = [snapshot(rate_of(group)) for group in groups]
        return Recipe(
            MomentumRule(first["momentum"], first["nesterov"], first["maximize"]),
            first["eps"],
            descent_rule(rates, list(map(decay_of, groups)), first["decay_mode"]),
            first["second_moment_beta"],
            self.scalings.on(key.sharers, key.device),
            self._groups,
        )


def recipe_key(matrices: Sequence[Matrix]) -> RecipeKey:
    """Return the key of matrices of one family, whose groups may differ in learning rate and decay alone."""
    numbers, parameter = tuple(matrix.parameter.group for matrix in matrices), matrices[0].parameter
    return RecipeKey(numbers[:1] if len(set(numbers)) == 1 else numbers, parameter.sharers, parameter.device)


def snapshot(value: Union[float, Tensor, None]) -> Union[float, Tensor, None]:
    """Return a copy of a 0-d tensor, since schedulers and scalers change theirs in place; a number as it is."""
    return value.clone() if isinstance(value, Tensor) else value
