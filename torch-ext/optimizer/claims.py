"""What ranks that share parameters must agree about: parameters and settings, as lines of text."""

from __future__ import annotations

from typing import Any, Container, Mapping, NamedTuple, Optional, Sequence

from torch import Tensor

from .distributed.placement import Layout, layout_of
from .iteration import default_work_dtype
from .param_groups import PLANNED, RECIPE, names_of

Group = Mapping[str, Any]
Ranks = tuple[int, ...]

# Those that schedulers and users may move between steps, of both branches.
LIVE = ("lr", "weight_decay", "rounding_step", *RECIPE, "fallback", "adamw_betas", "adamw_eps")


class Claims(NamedTuple):
    """What ranks that share parameters must agree about: a line for each parameter, of a group, and a line for all."""

    of_all: str
    names: list[str]
    lines: list[str]
    parameters: list[Tensor]
    groups: list[Group]  # each once
    positions: list[int]  # of each parameter's group

    def settings(self) -> str:
        """Return what schedulers and users may have moved, as one line."""
        return "; ".join(str(_live_settings(group)) for group in self.groups)

    def with_settings(self) -> list[str]:
        """Return all lines, those of parameters with what schedulers and users may have moved."""
        live = [_live_settings(group) for group in self.groups]
        return [self.of_all, *(f"{line} and {live[position]}" for line, position in zip(self.lines, self.positions))]


def claims_of(
    groups: Sequence[Group], of_all: str, shared: Optional[Ranks], state: Container[Tensor]
) -> dict[Ranks, Claims]:
    """Return the claims of all groups of ranks that share parameters with this one; `of_all` is a line for each.

    `shared` are the ranks that have a copy of every plain parameter; those without `state` are frozen.
    """
    found: dict[Ranks, Claims] = {}
    for group in groups:
        for name, p in zip(names_of(group), group["params"]):
            layout = layout_of(name, p, shared)
            if layout is None:
                continue
            claims = found.setdefault(layout.mesh.members, Claims(of_all, [], [], [], [], []))
            frozen = not p.is_meta and p not in state
            claims.names.append(name)
            claims.lines.append(_claim_of(name, p, layout, group) + (", frozen" if frozen else ""))
            claims.parameters.append(p)
            if not claims.groups or claims.groups[-1] is not group:  # parameters come group by group
                claims.groups.append(group)
            claims.positions.append(len(claims.groups) - 1)
    return found


def _claim_of(name: str, p: Tensor, layout: Layout, group: Group) -> str:
    """Return what the plan of a parameter depends on, as one line."""
    settings = {key: group[key] for key in (*PLANNED, "momentum_dtype")}
    settings = {key: getattr(value, "__qualname__", value) for key, value in settings.items()}  # functions by name
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    if group["use_muon"] and group["ns_dtype"] is None:  # each rank's own choice, by what its processor multiplies
        settings["ns_dtype"] = f"None, here {default_work_dtype(p)}"
    return (
        f"{name} {tuple(p.shape)} {p.dtype} on a mesh {layout.mesh.shape} (ranks {layout.mesh.digest}) split "
        f"{layout.splits}, in memory {order}, with {settings}"
    )


def _live_settings(group: Group) -> dict[str, Any]:
    """Return what a step reads of a group anew; a number that is on a GPU, and would be waited for, is left out."""
    found = {}
    for key in LIVE:
        value = group[key]
        if not isinstance(value, Tensor):
            found[key] = value
        elif value.device.type == "cpu":
            found[key] = value.item()
    return found
