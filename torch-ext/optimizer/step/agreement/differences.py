"""What an error says where the lines or settings of ranks differ: only what differs, and whose it is."""

from __future__ import annotations

import hashlib
import itertools
from typing import Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from ...parameters.names import listed
from ...plan.process_groups import Ranks, explaining_timeouts, gathered, group_of
from ...plan.terms import BETWEEN, BETWEEN_LINES, Terms


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


def difference_of_settings(terms: Terms, settings: Mapping[int, str]) -> str:
    """Return a text that says how the `Terms.settings` of two ranks, which are unlike, differ."""
    ranks, texts = zip(*settings.items())
    (kernels, *lines), (kernels_there, *lines_there) = (text.split(BETWEEN_LINES) for text in texts)
    differing = [
        (name, _only_in(here, there), _only_in(there, here))
        for name, here, there in zip(terms.names, _of_each(lines), _of_each(lines_there))
        if here != there
    ]
    if not differing:
        return (
            f"ranks do not have the same kernels for {listed(terms.names)}: rank {ranks[0]} has {kernels}, rank "
            f"{ranks[1]} has {kernels_there}"
        )
    _, *had = differing[0]
    names = listed([name for name, *pieces in differing if pieces == had])
    return f"ranks had different settings for {names}: rank {ranks[0]} had {had[0]}, rank {ranks[1]} had {had[1]}"


def _only_in(settings: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return the settings that are not the same in `others`. Numbers in tensors on a GPU are not compared."""
    keys = [key for key in {**settings, **others} if settings.get(key) != others.get(key)]
    return ", ".join(f"{key}: {settings.get(key, 'in a tensor on its device')}" for key in keys)


def _of_each(lines: Sequence[str]) -> list[dict[str, str]]:
    """Return the settings of each parameter, from lines that have one for each run of equal ones, and its length."""
    runs = [line.split(BETWEEN) for line in lines]
    return [dict(text.split(": ", 1) for text in settings) for count, *settings in runs for _ in range(int(count))]
