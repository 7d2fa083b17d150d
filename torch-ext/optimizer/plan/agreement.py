"""What ranks that share parameters must agree about: lines of text, and a digest of them that they compare."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Container, Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..iteration import default_work_dtype
from ..parameters.groups import names_of
from ..parameters.settings import COMPARED_AT_EVERY_STEP, COMPARED_ONCE, Group
from .layout import Layout, layout_of, local_part
from .process_groups import Ranks, explaining_timeouts, gathered, group_of, this_rank


class Copies(NamedTuple):
    """Parameters that lie alike and in several copies: what the copies of a part do must be the same."""

    positions: tuple[int, ...]  # of those of which this rank's part is not empty, among the parameters of the terms
    sharers: tuple[Ranks, ...]  # of each part, the ranks that have a copy of it
    part: int  # the one that this rank has
    weight: int  # of this rank among the sharers of its part, by `counterweight`


class Terms(NamedTuple):
    """What the ranks that share some parameters must agree about: a line for each parameter, and one for all."""

    common_line: str
    failed: str  # what has failed its proof on this rank, which takes something else there; no part of the digest
    names: tuple[str, ...]
    lines: tuple[str, ...]
    places: tuple[tuple[int, int], ...]  # of each parameter: the number of its group, and where it is there
    device: torch.device
    copies: tuple[Copies, ...]
    weight: int  # of this rank among all, by `counterweight`
    digest: str  # of these lines

    def settings(self, groups: Sequence[Group]) -> str:
        """Return what schedulers and users may have moved, and what has failed, as one line."""
        live = (str(_live_settings(groups[number])) for number in dict.fromkeys(g for g, _ in self.places))
        return "; ".join((*live, self.failed))

    def with_settings(self, groups: Sequence[Group]) -> list[str]:
        """Return all lines, those of parameters with what schedulers and users may have moved."""
        lines = (f"{line} and {_live_settings(groups[number])}" for line, (number, _) in zip(self.lines, self.places))
        return [self.common_line, self.failed, *lines]


class _Shared(NamedTuple):
    """A parameter that this rank shares with others."""

    name: str
    line: str
    place: tuple[int, int]
    device: torch.device
    layout: Layout
    is_empty: bool  # this rank's part


def terms_of(
    groups: Sequence[Group],
    common_line: str,
    failed: Mapping[Ranks, str],
    replica_ranks: Optional[Ranks],
    state: Container[Tensor],
) -> dict[Ranks, Terms]:
    """Return the terms of all groups of ranks that share parameters with this one.

    `common_line` is a line of each; `failed` has for some of them one that says what has failed its proof on this rank.
    `replica_ranks` have a copy of every plain parameter; parameters without `state` are frozen.
    """
    shared: dict[Ranks, list[_Shared]] = {}
    for number, group in enumerate(groups):
        for position, (name, p) in enumerate(zip(names_of(group), group["params"])):
            layout = layout_of(name, p, replica_ranks)
            if layout is None or this_rank() not in layout.mesh:
                continue
            frozen = ", frozen" if not p.is_meta and p not in state else ""
            line, local = _line_of(name, p, layout, group) + frozen, local_part(p)
            entry = _Shared(name, line, (number, position), local.device, layout, not local.numel())
            shared.setdefault(layout.mesh.members, []).append(entry)
    return {ranks: _terms(ranks, common_line, failed.get(ranks, ""), entries) for ranks, entries in shared.items()}


def counterweight(ranks: Ranks) -> int:
    """Return this rank's factor, of factors whose sum over `ranks` is 0.

    Equal numbers times these sum to 0. Random numbers that are not all equal do so by chance alone. So one number,
    summed over ranks, tells whether all have the same.
    """
    return 1 - len(ranks) if this_rank() == ranks[0] else 1


def _terms(ranks: Ranks, common_line: str, failed: str, parameters: Sequence[_Shared]) -> Terms:
    names, lines, places, devices, _, _ = zip(*parameters)
    digest = hashlib.sha256("\n".join((common_line, *lines)).encode()).hexdigest()
    copies = tuple(_copies(parameters))
    return Terms(common_line, failed, names, lines, places, devices[0], copies, counterweight(ranks), digest)


def _copies(parameters: Sequence[_Shared]) -> Iterator[Copies]:
    """Yield the parameters that lie in several copies, those together whose copies are on the same ranks."""
    alike: dict[tuple, list[int]] = {}
    for position, parameter in enumerate(parameters):
        if parameter.layout.copies > 1:
            alike.setdefault((parameter.layout.mesh, parameter.layout.splits), []).append(position)
    for positions in alike.values():
        layout = parameters[positions[0]].layout
        sharers: dict[int, list[int]] = {}
        for rank in layout.mesh.members:
            sharers.setdefault(layout.part_of(rank), []).append(rank)
        here = tuple(position for position in positions if not parameters[position].is_empty)
        part = layout.part_of(this_rank())
        in_order = tuple(tuple(sharers[number]) for number in range(len(sharers)))
        yield Copies(here, in_order, part, counterweight(in_order[part]))


def difference_of_lines(ranks: Ranks, lines: Sequence[str], device: torch.device, names: str) -> str:
    """Return which of `ranks` first differs from the first of them in its `lines`, and where.

    All ranks must call it, who do not all have the same lines. Where they do not come, the error says that it was for
    the parameters `names`.
    """
    digests = gathered(hashlib.sha256("\n".join(lines).encode()).digest(), ranks, "plans", names)
    odd = ranks[next(i for i, digest in enumerate(digests) if digest != digests[0])]
    group = group_of(ranks, names)
    with explaining_timeouts("plans", names):
        plans = [_broadcast(lines, rank, group, device) for rank in (ranks[0], odd)]
    pairs = itertools.zip_longest(*plans, fillvalue="nothing more")
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"ranks disagree about what they update: rank {ranks[0]} has {first}, rank {odd} has {other}"


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
