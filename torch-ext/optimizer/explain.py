"""What the optimizer says of itself: where each parameter goes and why, what it runs on, and what is exchanged."""

from __future__ import annotations

import math
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

from torch import Tensor

from .learning_rate import UPDATE_RMS
from .parameters.advice import advice, remarks
from .parameters.given import given_list
from .parameters.groups import names_of, reason_of
from .parameters.matrices import is_stack, view_in_group
from .parameters.routing import IsMuon, decide, unique_parameters
from .parameters.settings import OF_GROUPS, Group, multiplier_in_group
from .parameters.state import has_remainder
from .plan.plan import Plan
from .plan.sums import described

# The name and the kernel of each.
_FALLBACKS = {"adamw": ("AdamW", "torch._fused_adamw_"), "nadamw": ("NAdamW", "torch._foreach_*")}


class Route(NamedTuple):
    """Where one parameter goes; `branch` is `muon`, `adamw` or `nadamw`, and what does not apply is None."""

    name: str
    shape: tuple[int, ...]
    branch: str
    reason: str
    matrices: int = 0
    multiplier: Optional[float] = None
    owner: Union[int, str, None] = None  # a rank, `several` for matrices of several; None: this process
    kernel: Optional[str] = None


class Explanation:
    """The routes of all parameters, in `rows`, and the lines below them, in `notes`; printed as a table."""

    def __init__(self, rows: Iterable[Route], notes: Iterable[str] = ()):
        self.rows = list(rows)
        self.notes = list(notes)

    def __str__(self) -> str:
        cells = [Route._fields, *([_cell(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        muon = [math.prod(row.shape) for row in self.rows if row.branch == "muon"]
        rest = [math.prod(row.shape) for row in self.rows if row.branch != "muon"]
        branches = {row.branch for row in self.rows}
        fallbacks = [name for branch, (name, _) in _FALLBACKS.items() if branch in branches] or ["AdamW"]
        summary = f"{len(muon)} parameters ({sum(muon):,} elements) by Muon, "
        summary += f"{len(rest)} ({sum(rest):,} elements) by {' and '.join(fallbacks)}"
        return "\n".join([*lines, summary, *self.notes])

    __repr__ = __str__


# What of Muon's settings decides where a parameter goes and what it is there, with Muon's defaults.
_ROUTING = {
    "adjust_lr_fn": "match_rms_adamw",
    "update_rms": UPDATE_RMS,
    "experimental_hyperball": False,
    "conv_mode": "flatten",
    "normalize_spatial": True,
    "expert_keys": ("experts",),
    "stacked": None,
}


def route(
    params: Iterable[Union[Tensor, tuple[str, Tensor]]], *, is_muon: Optional[IsMuon] = None, **settings: Any
) -> Explanation:
    """Return where `Muon(params, ...)` would take each parameter, as `explain()` does, without an optimizer.

    `params` are tensors or `(name, tensor)` pairs; tied ones come once. Of Muon's arguments `is_muon`, `adjust_lr_fn`,
    `update_rms`, `experimental_hyperball`, `conv_mode`, `normalize_spatial`, `expert_keys` and `stacked` count. Raises
    TypeError for others.
    """
    if not settings.keys() <= _ROUTING.keys():
        raise TypeError(f"of settings route takes {', '.join(_ROUTING)}, got {', '.join(settings)}")
    stacks = [{**_ROUTING, **settings}[key] for key in ("expert_keys", "stacked")]
    rows = []
    for names, p in unique_parameters(given_list(params)):
        branch, reason = decide(names, p, is_muon, is_stack(names[0], p.ndim, *stacks))
        if branch == "adamw":
            rows.append(Route(names[0], tuple(p.shape), branch, reason))
            continue
        rows.append(route_in_group(names[0], p, reason, settings))
    return Explanation(rows, advice(rows) + remarks(rows))


def explanation_of(
    groups: Sequence[Group], plan: Plan, reasons: Mapping[Tensor, str], notes: Iterable[str] = ()
) -> Explanation:
    """Return a row for each parameter of `groups`, a line for each exchange of their `plan`, and these `notes`."""
    planned, shared = iter(plan.matrices), plan.shared_work()
    owners = {**plan.owners(), **dict.fromkeys(plan.summed(), "all")}
    rows = []
    for group in groups:
        for name, p in zip(names_of(group), group["params"]):
            # A parameter that a wrapper has put in another's place was not routed: its group says where it is.
            reason = reasons.get(p, reason_of(group))
            if not group["use_muon"]:
                _, kernel = _FALLBACKS[group["fallback"]]
                kernel += _decay_of(group) + _master_weights_of(p, group)
                rows.append(Route(name, tuple(p.shape), group["fallback"], reason, kernel=kernel))
                continue
            matrices = next(planned)
            route = route_in_group(name, p, reason, group)
            owner = {owners[matrix.key] for matrix in matrices if matrix.key in owners} or {None}
            kernel = next((shared[m.key] for m in matrices if m.key in shared), matrices[0].iteration.explained)
            parameter = matrices[0].parameter
            kernel += str(parameter.equalization) + parameter.moments_described + parameter.momentum_described
            kernel += _decay_of(group) + _master_weights_of(p, group)
            rows.append(route._replace(kernel=kernel, owner=owner.pop() if len(owner) == 1 else "several"))
    return Explanation(
        rows, [*map(str, plan.exchanges), *map(described, plan.sums), *notes, *advice(rows), *remarks(rows)]
    )


def route_in_group(name: str, p: Tensor, reason: str, settings: Group) -> Route:
    """Return the route of a parameter that Muon updates by these settings of its group, the others being the defaults.

    Its multiplier is that of the first of its matrices.
    """
    group = {**_ROUTING, **OF_GROUPS, **settings}
    view = view_in_group(name, p, group)
    reason = reason if str(view) == "x".join(map(str, p.shape)) else f"{reason}: {view}"
    multiplier = multiplier_in_group(group, *view.shapes[0]) * view.scale
    return Route(name, tuple(p.shape), "muon", reason, len(view.shapes), multiplier)


def _decay_of(group: Group) -> str:
    if group["use_muon"] and group["experimental_hyperball"]:
        return ", norm kept without decay (Hyperball, experimental)"
    return "" if group["decay_mode"] == "decoupled" else f", {group['decay_mode']} decay"


def _master_weights_of(p: Tensor, group: Group) -> str:
    return ", float32 in two halves" if has_remainder(p, group) else ""


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
