"""What an error says where the lines or settings of ranks differ: only what differs, and whose it is."""

from __future__ import annotations

import hashlib
import itertools
from typing import Optional, Sequence

import torch
import torch.distributed as dist

from ..parameters.groups import listed
from .process_groups import Ranks, explaining_timeouts, gathered, group_of
from .terms import BETWEEN, BETWEEN_LINES, Terms


def difference_of_lines(ranks: Ranks, lines: Sequence[str], device: torch.device, names: str) -> str:
    """Return which of `ranks` is the first whose `lines` differ from those of the first rank, and in which line.

    Collective: all ranks must call it, and only if their lines are not all equal. If a rank does not come, the error
    names the parameters `names`.
    """
    digests = gathered(hashlib.sha256("\n".join(lines).encode()).digest(), ranks, device, "plans", names)
    odd = ranks[next(i for i, digest in enumerate(digests) if digest != digests[0])]
    group = group_of(ranks, names)
    with explaining_timeouts("plans", names):
        plans = [_broadcast(lines, rank, group, device) for rank in (ranks[0], odd)]
    first, other = _difference(*plans)
    return f"ranks disagree about what they update: rank {ranks[0]} has {first}, rank {odd} has {other}"


def _difference(*plans: Sequence[str]) -> list[str]:
    """Return of each plan the first line that is another one there, without the pieces that both lines have.

    The first pieces stay: they name a parameter. If these differ, as for another order, they are all that is returned;
    unless the second plan has that parameter elsewhere, with other settings.
    """
    first, second = ([line.split(BETWEEN) for line in plan] for plan in plans)
    pairs = itertools.zip_longest(first, second, fillvalue=["nothing more"])
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    other = next((line for line in second if line[0] == one[0] and line != one), other)
    heads, *rest = itertools.zip_longest(one, other, fillvalue="nothing more")
    differing = [pair for pair in rest if pair[0] != pair[1]] if heads[0] == heads[1] else []
    return [": ".join(filter(None, (head, ", ".join(pieces)))) for head, *pieces in zip(heads, *differing)]


def _broadcast(lines: Sequence[str], rank: int, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return the lines of `rank`, on all ranks of the group."""
    boxed: list[Optional[list[str]]] = [list(lines)]
    dist.broadcast_object_list(boxed, src=rank, group=group, device=device)
    return boxed[0]


def difference_of_settings(terms: Terms, one: str, other: str) -> tuple[str, str, str]:
    """Return whose settings differ first in two texts of `Terms.settings`, and what each text has that differs."""
    (failed, *lines), (failed_there, *lines_there) = (text.split(BETWEEN_LINES) for text in (one, other))
    of_each = list(zip(terms.names, _of_each(lines), _of_each(lines_there)))
    differing = [(here, there) for _, here, there in of_each if here != there]
    if not differing:
        return listed(terms.names), failed, failed_there
    here, there = differing[0]
    names = [name for name, *pair in of_each if pair == [here, there]]
    return listed(names), _only_in(here, there), _only_in(there, here)


def _only_in(settings: Sequence[str], others: Sequence[str]) -> str:
    # What one rank alone has as a number on a GPU is compared by no text of its.
    return ", ".join(text for text in settings if text not in others) or "a number on its device in its place"


def _of_each(lines: Sequence[str]) -> list[list[str]]:
    """Return the settings of each parameter, from lines that have one for each run of equal ones, and its length."""
    runs = [line.split(BETWEEN) for line in lines]
    return [settings for count, *settings in runs for _ in range(int(count))]
