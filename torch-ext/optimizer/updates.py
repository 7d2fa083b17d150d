"""Settings of groups become rules, and their parameters the lists that rules work on."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Optional, Sequence

from torch import Tensor

from .distributed.pipeline import Part, Recipe, update_batch_
from .distributed.plan import Batch, positions_by
from .matrices import MatrixView
from .parameters import GradientScaling
from .rules.adamw import AdamWRule, AdamWState, adamw_
from .rules.descent import descent_rule
from .rules.momentum import MomentumRule
from .rules.nadamw import NAdamWRule, NAdamWState, nadamw_
from .telemetry import Seen

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Tensor]]

_FALLBACKS = {"adamw": (AdamWRule, AdamWState, adamw_), "nadamw": (NAdamWRule, NAdamWState, nadamw_)}


def update_matrices_(
    batches: Iterable[Batch],
    matrices: Sequence[tuple[Tensor, Group, MatrixView]],
    state: State,
    row_scales: Mapping[Tensor, Tensor],
    scaling: GradientScaling,
) -> list[Seen]:
    """Update the planned `matrices`, parameters with their groups and views, that have a gradient, and their momentum.

    `row_scales` has a factor for each row of some of the parameters.
    """
    cut = {
        number: _parts(number, p, group, view, state[p]["momentum_buffer"], row_scales.get(p))
        for number, (p, group, view) in enumerate(matrices)
        if p.grad is not None
    }
    seen = []
    for batch in batches:
        members = [member for member in batch.members if member.parameter in cut]
        if not members:
            continue
        recipe = recipe_of([matrices[member.parameter][1] for member in members], scaling)
        norms = update_batch_(batch, [cut[member.parameter][member.index] for member in members], recipe)
        seen.append(Seen(norms, len(members) * batch.rows * batch.cols, batch.multiplier, recipe.descent))
    return seen


def recipe_of(groups: Sequence[Group], scaling: GradientScaling) -> Recipe:
    """Return the recipe of a batch whose members are of `groups`, which may differ in lr and weight decay alone."""
    first = groups[0]
    own = groups[:1] if all(group is first for group in groups) else groups
    return Recipe(
        MomentumRule(first["momentum"], first["nesterov"], first["maximize"]),
        first["eps"],
        descent_rule([g["lr"] for g in own], [g["weight_decay"] for g in own], first["decay_mode"]),
        scaling,
    )


def update_fallback_(group: Group, state: State, scaling: GradientScaling) -> None:
    """Update the parameters of a group that is not Muon's and that have a gradient, and their state."""
    params = [p for p in group["params"] if p.grad is not None]
    make_rule, make_state, rule_ = _FALLBACKS[group["fallback"]]
    rule = make_rule(group["lr"], group["adamw_betas"], group["adamw_eps"], group["weight_decay"], group["maximize"])
    for members in positions_by((p.device, p.dtype) for p in params):
        chosen = [params[i] for i in members]
        states = [make_state(*(state[p][key] for key in ("exp_avg", "exp_avg_sq", "step"))) for p in chosen]
        rule_(chosen, [p.grad for p in chosen], states, rule, scaling)


def scale_rows_(p: Tensor, row_scale: Tensor, scaling: GradientScaling) -> None:
    """Multiply each row of `p`, in place, with its factor; a bias has one element a row."""
    kept = row_scale if scaling.found_inf is None else row_scale.where(scaling.found_inf == 0, 1)
    p.mul_(kept.to(p.dtype).reshape(-1, *[1] * (p.ndim - 1)))


def _parts(
    number: int, p: Tensor, group: Group, view: MatrixView, buffer: Tensor, row_scale: Optional[Tensor]
) -> list[Part]:
    """Return the matrices of a parameter, cut alike from itself, its momentum buffer and its gradient."""
    parts = [Part(*cut) for cut in zip(view.matrices(p), view.matrices(buffer), view.matrices(p.grad, read_only=True))]
    if row_scale is not None:
        parts = [part._replace(row_scale=own) for part, own in zip(parts, view.row_values(row_scale))]
    if group["stochastic_rounding"]:
        # A seed for each matrix and step: 2**20 matrices a parameter, 2**20 parameters, and 2**23 steps.
        first = (group["rounding_step"] << 40) + (number << 20)
        parts = [part._replace(seed=first + index) for index, part in enumerate(parts)]
    return parts
