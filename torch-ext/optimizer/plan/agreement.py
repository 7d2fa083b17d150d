"""What ranks that share parameters must agree about, as lines of text that they compare before the first step."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Container, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..iteration import default_work_dtype
from ..parameters.groups import names_of
from ..parameters.settings import COMPARED_AT_EVERY_STEP, COMPARED_ONCE, Group
from .layout import Layout, layout_of, local_part
from .process_groups import Ranks, explaining_timeouts, group_of


class Terms(NamedTuple):
    """What the ranks that share some parameters must agree about: a line for each parameter, and one for all."""

    common_line: str
    names: tuple[str, ...]
    lines: tuple[str, ...]
    groups: tuple[int, ...]  # the number of each parameter's group
    device: torch.device

    @property
    def fixed(self) -> tuple[str, ...]:
        """The lines without what schedulers move."""
        return self.common_line, *self.lines

    def settings(self, groups: Sequence[Group]) -> str:
        """Return what schedulers and users may have moved, as one line."""
        return "; ".join(str(_live_settings(groups[number])) for number in dict.fromkeys(self.groups))

    def with_settings(self, groups: Sequence[Group]) -> list[str]:
        """Return all lines, those of parameters with what schedulers and users may have moved."""
        lines = zip(self.lines, self.groups)
        return [self.common_line, *(f"{line} and {_live_settings(groups[number])}" for line, number in lines)]


def terms_of(
    groups: Sequence[Group], common_line: str, replica_ranks: Optional[Ranks], state: Container[Tensor]
) -> dict[Ranks, Terms]:
    """Return the terms of all groups of ranks that share parameters with this one; `common_line` is a line for each.

    `replica_ranks` have a copy of every plain parameter; parameters without `state` are frozen.
    """
    shared: dict[Ranks, list[tuple[str, str, int, torch.device]]] = {}
    for number, group in enumerate(groups):
        for name, p in zip(names_of(group), group["params"]):
            layout = layout_of(name, p, replica_ranks)
            if layout is not None:
                frozen = ", frozen" if not p.is_meta and p not in state else ""
                entry = name, _line_of(name, p, layout, group) + frozen, number, local_part(p).device
                shared.setdefault(layout.mesh.members, []).append(entry)
    terms = {}
    for ranks, entries in shared.items():
        names, lines, numbers, devices = zip(*entries)
        terms[ranks] = Terms(common_line, names, lines, numbers, devices[0])
    return terms


def check_agreement(ranks: Ranks, lines: Sequence[str], device: torch.device) -> None:
    """Raise ValueError on each of `ranks` unless all of them have the same `lines`, one for each parameter.

    The message names the first rank that differs from the first of `ranks`, and where. All ranks must call it.
    """
    group = group_of(ranks)
    digest = torch.frombuffer(bytearray(hashlib.sha256("\n".join(lines).encode()).digest()), dtype=torch.uint8)
    digest = digest.to(device)
    gathered = [torch.empty_like(digest) for _ in ranks]
    with explaining_timeouts("plans"):
        dist.all_gather(gathered, digest, group=group)
        digests = torch.stack(gathered).cpu()
        others = (digests != digests[0]).any(1).nonzero().flatten().tolist()
        if not others:
            return
        odd = ranks[others[0]]
        plans = [_broadcast(lines, rank, group, device) for rank in (ranks[0], odd)]
    pairs = itertools.zip_longest(*plans, fillvalue="nothing more")
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(f"ranks disagree about what they update: rank {ranks[0]} has {first}, rank {odd} has {other}")


def _line_of(name: str, p: Tensor, layout: Layout, group: Group) -> str:
    """Return what the plan of a parameter depends on, as one line."""
    settings = {key: getattr(group[key], "__qualname__", group[key]) for key in COMPARED_ONCE}  # functions by name
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    if group["use_muon"] and group["ns_dtype"] is None:  # each rank's own choice, by what its processor multiplies
        settings["ns_dtype"] = f"None, here {default_work_dtype(p)}"
    return (
        f"{name} {tuple(p.shape)} {p.dtype} on a mesh {layout.mesh.shape} (ranks {layout.mesh.digest}) split "
        f"{layout.splits}, in memory {order}, with {settings}"
    )


def _live_settings(group: Group) -> dict[str, Any]:
    """Return what a step reads of a group; a number that is on a GPU, and would be waited for, is left out."""
    values = {key: group[key] for key in COMPARED_AT_EVERY_STEP}
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in values.items()
        if not isinstance(value, Tensor) or value.device.type == "cpu"
    }


def _broadcast(lines: Sequence[str], rank: int, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return the lines that `rank` has."""
    boxed: list[Optional[list[str]]] = [list(lines)]
    dist.broadcast_object_list(boxed, src=rank, group=group, device=device)
    return boxed[0]
