"""What ranks that share parameters must agree about: lines of text, whose digest they compare."""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..iteration import default_work_dtype
from ..parameters.matrices import view_in_group
from ..parameters.names import named_parameters
from ..parameters.sequences import grouped
from ..parameters.settings import COMPARED_AT_EVERY_STEP, PLANNED, Group, multiplier_in_group
from ..parameters.state import BUFFER, State
from .layout import Layout, layout_of, local_part, runs_of
from .process_groups import Ranks, this_rank
from .runs import length

# Between the pieces of a line and the lines of a text, so that an error can leave out what two have in common. No name
# has these.
BETWEEN, BETWEEN_LINES = "\x1f", "\x1e"


class RankSets(NamedTuple):
    """Sets of ranks, and parameters that all ranks of a set must treat alike. No rank is in two of the sets."""

    positions: tuple[int, ...]  # among the parameters of the terms; only those whose part on this rank is not empty
    sets: tuple[Ranks, ...]
    set_index: int  # the number of this rank's set
    weight: int  # this rank's `counterweight` in its set, 0 if it is in none


class Terms(NamedTuple):
    """What the ranks that share some parameters must agree about: one common line, and a line for each parameter."""

    common_line: str
    kernels: str  # a line on those that failed here; in a warm-up, on those that can be measured. Not in the digest
    names: tuple[str, ...]
    lines: tuple[str, ...]
    group_positions: tuple[tuple[int, int], ...]  # of each parameter: the number of its group, and its position there
    device: torch.device
    copies: tuple[RankSets, ...]  # parameters in several copies; a set has the ranks with a copy of one part
    local_shards: tuple[RankSets, ...]  # shards of the fallback, which counts steps for each; the ranks that have one
    weight: int  # this rank's `counterweight` among all of these ranks
    digest: str  # of the common line and the lines

    def parameter(self, position: int, groups: Sequence[Group]) -> Tensor:
        """Return the parameter at a position of `names`."""
        number, place = self.group_positions[position]
        return groups[number]["params"][place]

    def settings(self, groups: Sequence[Group]) -> str:
        """Return the settings that schedulers and users may change between steps, and `kernels`, as lines of a text."""
        of_groups = {number: BETWEEN.join(_shown(_live_settings(groups[number]))) for number, _ in self.group_positions}
        # Ranks may have divided the same parameters into other groups, so neighbours with equal settings are counted.
        runs = itertools.groupby(of_groups[number] for number, _ in self.group_positions)
        return BETWEEN_LINES.join((self.kernels, *(f"{len(list(run))}{BETWEEN}{text}" for text, run in runs)))

    def with_settings(self, groups: Sequence[Group]) -> list[str]:
        """Return all lines. Those of parameters include the settings that may change between steps."""
        pairs = zip(self.lines, self.group_positions)
        lines = (BETWEEN.join((line, *_shown(_live_settings(groups[number])))) for line, (number, _) in pairs)
        return [self.common_line, self.kernels, *lines]


class _Shared(NamedTuple):
    """A parameter that this rank shares with other ranks."""

    name: str
    line: str
    group_positions: tuple[int, int]  # as in `Terms`
    device: torch.device
    layout: Layout
    is_empty: bool  # this rank's part has no elements
    is_local_shard: bool  # it is sharded, and the fallback updates the parts on their ranks


def terms_of(
    groups: Sequence[Group],
    common_line: str,
    stack_groups: Sequence[int],
    failed: Mapping[Ranks, str],
    replica_ranks: Optional[Ranks],
    state: State,
) -> dict[Ranks, Terms]:
    """Return the terms for each set of ranks that shares parameters with this rank.

    `common_line` is part of all terms. `stack_groups` has, for each group, the number of the first group whose matrices
    may share batches, and so messages, with its own: ranks must divide their parameters alike. `failed` has, for some
    sets, a line about kernels that failed their proof here. `replica_ranks` have a copy of every plain parameter.
    Parameters without `state` are frozen.
    """
    shared: dict[Ranks, list[_Shared]] = {}
    first_of: dict[tuple[Ranks, int], int] = {}  # the first parameter of a stack group among those that ranks share
    for number, group in enumerate(groups):
        for position, (name, p) in enumerate(named_parameters(group)):
            layout = layout_of(name, p, replica_ranks)
            if layout is None or this_rank() not in layout.mesh:
                continue
            pieces, local = [*_pieces_of(name, p, layout, group), _state_of(p, state)], local_part(p)
            is_local_shard = bool(layout.split_dims) and not group["use_muon"]
            others = shared.setdefault(layout.mesh.members, [])
            first = first_of.setdefault((layout.mesh.members, stack_groups[number]), len(others))
            line = BETWEEN.join((*pieces, f"in batches with parameter {first}"))
            entry = _Shared(name, line, (number, position), local.device, layout, not local.numel(), is_local_shard)
            others.append(entry)
    none = "failed here: nothing"  # ranks that share only parameters of the fallback
    return {ranks: _terms(ranks, common_line, failed.get(ranks, none), entries) for ranks, entries in shared.items()}


def counterweight(ranks: Ranks) -> int:
    """Return this rank's weight; the weights of all `ranks` sum to 0: 1 - n for the first of n ranks, 1 for the others.

    If all ranks have the same number, the weighted sum is 0. For random numbers that are not all equal, it is 0 only by
    chance. So one summed number tells whether all ranks have the same.
    """
    return 1 - len(ranks) if this_rank() == ranks[0] else 1


def _terms(ranks: Ranks, common_line: str, failed: str, parameters: Sequence[_Shared]) -> Terms:
    """Return the terms of some ranks, from all parameters that they share."""
    names, lines, group_positions = zip(*((each.name, each.line, each.group_positions) for each in parameters))
    digest = hashlib.sha256("\n".join((common_line, *lines)).encode()).hexdigest()
    sets = tuple(_copies(parameters)), tuple(_local_shards(parameters))
    # NCCL sends nothing from a CPU, where some of the parameters may be.
    device = next((each.device for each in parameters if each.device.type != "cpu"), parameters[0].device)
    return Terms(common_line, failed, names, lines, group_positions, device, *sets, counterweight(ranks), digest)


def _local_shards(parameters: Sequence[_Shared]) -> Iterator[RankSets]:
    """Yield the fallback's sharded parameters, grouped by the ranks that have a part."""
    local = [position for position, parameter in enumerate(parameters) if parameter.is_local_shard]
    for positions in grouped(local, lambda i: _ranks_with_elements(parameters[i].layout)):
        holders = _ranks_with_elements(parameters[positions[0]].layout)
        is_here = this_rank() in holders
        yield RankSets(tuple(positions) if is_here else (), (holders,), 0, counterweight(holders) if is_here else 0)


@functools.lru_cache(maxsize=256)
def _ranks_with_elements(layout: Layout) -> Ranks:
    """Return the ranks whose parts are not empty."""
    ranks, parts = layout.mesh.members, list(map(layout.part_of, layout.mesh.members))
    has_something = {part: all(map(length, runs_of(layout, rank))) for part, rank in dict(zip(parts, ranks)).items()}
    return tuple(rank for part, rank in zip(parts, ranks) if has_something[part])


def _copies(parameters: Sequence[_Shared]) -> Iterator[RankSets]:
    """Yield the parameters that have several copies, grouped by the ranks that their copies are on."""
    copied = [position for position, parameter in enumerate(parameters) if parameter.layout.copies > 1]
    for positions in grouped(copied, lambda i: (parameters[i].layout.mesh, parameters[i].layout.splits)):
        layout = parameters[positions[0]].layout
        here = tuple(position for position in positions if not parameters[position].is_empty)
        part = layout.part_of(this_rank())
        sets = grouped(layout.mesh.members, layout.part_of)
        in_order = tuple(map(tuple, sorted(sets, key=lambda ranks: layout.part_of(ranks[0]))))
        yield RankSets(here, in_order, part, counterweight(in_order[part]))


def _state_of(p: Tensor, state: State) -> str:
    """Return what ranks compare of a parameter's state: that it has none, or the dtype that momentum was loaded in."""
    if p.is_meta or p in state:
        return f"momentum in {state[p][BUFFER].dtype}" if BUFFER in state.get(p, ()) else "trained"
    return "frozen"


def _pieces_of(name: str, p: Tensor, layout: Layout, group: Group) -> list[str]:
    """Return everything that the plan of a parameter depends on, as pieces of a line."""
    settings = {key: group[key] for key in PLANNED}
    if callable(group["adjust_lr_fn"]):  # the text of a function may have its address, so what it returns is compared
        settings["adjust_lr_fn"] = _function_of(name, p, group)
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    columns = view_in_group(name, p, group).col_axes if group["use_muon"] else ()
    if group["use_muon"] and group["ns_dtype"] is None:  # each rank chooses by what its processor multiplies fast
        settings["ns_dtype"] = f"None, here {default_work_dtype(p)}"
    return [
        f"{name} {tuple(p.shape)}",
        f"{p.dtype}",
        f"on a mesh {layout.mesh.shape} (ranks {layout.mesh.digest})",
        f"split {layout.splits}",
        f"in memory {order}",
        f"columns {columns}",
        *_shown(settings),
    ]


def _shown(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key!r}: {value!r}" for key, value in settings.items()]


def _function_of(name: str, p: Tensor, group: Group) -> str:
    """Return the name of the function that gives multipliers, and those that it gives for a parameter of Muon's."""
    function = group["adjust_lr_fn"]
    shown = getattr(function, "__qualname__", type(function).__qualname__)
    if not group["use_muon"]:
        return shown
    view = view_in_group(name, p, group)
    multipliers = (
        f"{multiplier_in_group(group, *shape, view.scale)} for {shape}" for shape in dict.fromkeys(view.shapes)
    )
    return f"{shown}, which gives {', '.join(multipliers)}"


def _live_settings(group: Group) -> dict[str, Any]:
    """Return the settings that a step reads from a group, except numbers on a GPU, for which it would wait."""
    values = {key: group[key] for key in COMPARED_AT_EVERY_STEP}
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in values.items()
        if not isinstance(value, Tensor) or value.device.type == "cpu"
    }
