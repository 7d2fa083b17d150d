"""The meetings of ranks whose results the host has not read, because on a GPU it would have had to wait for them.

The next optimizer by which these ranks meet reads them first, on all ranks, whichever optimizer's step it was.
"""

from __future__ import annotations

import weakref
from typing import Mapping

import torch.distributed as dist

from ...parameters.names import listed
from ...plan.process_groups import Ranks
from ...plan.terms import Terms
from .meeting import Meeting, raise_disputes

# The last one of each set of ranks, with the world that it was held in.
_UNREAD: dict[Ranks, tuple[weakref.ref, Meeting]] = {}


def keep_unread(meeting: Meeting) -> None:
    """Keep a meeting until its result is read, in place of an earlier one of the same ranks."""
    _UNREAD[meeting.ranks] = weakref.ref(dist.group.WORLD), meeting


def forget_unread(ranks: Ranks) -> None:
    """Forget the last meeting of these ranks, whatever its result is."""
    _UNREAD.pop(ranks, None)


def read_all(terms: Mapping[Ranks, Terms]) -> None:
    """Raise RuntimeError, once, if ranks that share parameters disagreed at their last meeting; the host waits.

    All of these ranks must call it: if they disagreed, they tell each other who differed in what.
    """
    unread = _unread(terms)
    for meeting in unread:
        forget_unread(meeting.ranks)
    raise_disputes(unread)


def check_last_meeting(terms: Mapping[Ranks, Terms]) -> None:
    """Raise RuntimeError, once, if ranks that share parameters disagreed at their last meeting; the host waits.

    One rank may call it alone, because it sends nothing. So it cannot say who differed in what, as `read_all` will.
    """
    disputed = [meeting for meeting in _unread(terms) if not meeting.agrees()]
    if all(meeting.is_told for meeting in disputed):
        return
    for meeting in disputed:
        meeting.is_told = True
    names = listed([name for meeting in disputed for name in meeting.terms.names])
    raise RuntimeError(
        f"the ranks did not take the same last step, and nothing that they share was changed by it: {names}. The next "
        "step() on all of them says who differed in what. To get what there is, call this once more"
    )


def _unread(terms: Mapping[Ranks, Terms]) -> list[Meeting]:
    """Return the last meetings of ranks that share parameters, in their order, whose results the host has not read."""
    for ranks, (world, _) in list(_UNREAD.items()):
        if world() is not dist.group.WORLD:  # it was destroyed, so no rank will read them
            forget_unread(ranks)
    return [_UNREAD[ranks][1] for ranks in sorted(terms) if ranks in _UNREAD]
