"""What an optimizer and those of other ranks agree about from step to step: who they are, and that all go on."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from typing import Mapping, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..parameters.settings import Group
from ..plan.agreement import Terms
from ..plan.process_groups import Ranks, all_reduce_max_, shortened
from ..rules.scaling import GradientScaling
from .agreement import Meeting, Statement, absent_of, raise_disputes

_SERIALS = itertools.count()
_LIVING: weakref.WeakSet[RankAgreement] = weakref.WeakSet()
# What ranks have said to each other that the host has not read yet, by the ranks: whoever's step it was, the next
# optimizer by which they meet reads it first, on all of them.
_UNREAD: dict[Ranks, tuple[weakref.ref, Meeting]] = {}
# The largest number that an optimizer got of those that share parameters with these ranks.
_NUMBERS: Counter[Ranks] = Counter()


class Acquaintance(NamedTuple):
    """Ranks that this optimizer has met: with which plan, and which number they gave it."""

    digest: str
    number: int


class RankAgreement:
    """An optimizer among those of other ranks with which it shares parameters.

    When ranks meet for the first time, or with a new plan, they give the optimizer a number, by which it is told from
    others with like parameters, such as an actor from a critic. Which one is meant then is clear by their age: of those
    living ones with this plan that have no number yet, it is as old on all ranks.
    """

    def __init__(self, digests: Optional[Mapping[Ranks, str]] = None):
        self._serial = next(_SERIALS)
        self._digests = dict(digests or {})  # of its plan, for each set of ranks
        self.forget()
        _LIVING.add(self)

    def __reduce__(self):
        return RankAgreement, (self._digests,)  # a copy is another optimizer

    def forget(self) -> None:
        """Meet the other ranks anew."""
        self._known: dict[Ranks, Acquaintance] = {}
        self._steps = 0
        self._read: Sequence[Meeting] = ()  # of this step

    def follow(self, terms: Mapping[Ranks, Terms]) -> None:
        """Take note of the terms of a new plan."""
        self._digests = {ranks: shared.digest for ranks, shared in terms.items()}

    def meet(self, act: str, terms: Mapping[Ranks, Terms], groups: Sequence[Group]) -> None:
        """Raise ValueError or RuntimeError unless all ranks that share parameters do `act` with the same plan."""
        meetings, _ = self._meet(act, terms, groups, None)
        read_all(terms)
        raise_disputes(meetings)

    def begin_step(
        self, terms: Mapping[Ranks, Terms], groups: Sequence[Group], scaling: GradientScaling
    ) -> dict[Optional[Ranks], GradientScaling]:
        """Return `scaling` as each set of ranks that share parameters agrees about it; all of them must call it.

        Gradients overflow for all of them or for none. The scaling of None is for this process alone. Where ranks are
        not at one their gradients overflow, so that nothing which they share changes; `end_step` tells. Raises as
        `meet`.
        """
        meetings, overflows = self._meet(f"step {self._steps + 1}", terms, groups, scaling.found_inf)
        self._steps += 1
        self._read = [meeting for meeting in meetings if meeting.is_known]
        shared = {ranks: scaling._replace(found_inf=overflow) for ranks, overflow in overflows.items()}
        return {None: scaling, **shared}

    def end_step(self) -> None:
        """Raise RuntimeError, which says who differs and in what, where it is known that ranks were not at one."""
        known, self._read = self._read, ()
        raise_disputes(known)

    def _meet(
        self, act: str, terms: Mapping[Ranks, Terms], groups: Sequence[Group], found_inf: Optional[Tensor]
    ) -> tuple[list[Meeting], dict[Ranks, Tensor]]:
        read_all(terms)
        meetings, overflows, errors = [], {}, []
        for ranks, shared in sorted(terms.items()):
            known = self._known.get(ranks)
            is_new = known is None or known.digest != shared.digest
            name = f"new optimizer {self._seniority(ranks)}" if is_new else f"optimizer {known.number}"
            absent = absent_of(shared, groups) if act.startswith("step") else ()
            settings = shared.settings(groups)
            meeting = Meeting(ranks, shared, Statement(act, name, not is_new, shared.digest, settings, absent))
            overflows[ranks] = meeting.overflow(found_inf)
            meetings.append(meeting)
            if not meeting.is_known and not (is_new and meeting.all_are_new()):
                _UNREAD[ranks] = weakref.ref(dist.group.WORLD), meeting
                continue
            error = meeting.strangers(groups, is_new)
            if error is not None:  # and other ranks are not kept waiting
                errors.append(error)
            elif is_new:
                self._known[ranks] = Acquaintance(shared.digest, _new_number(ranks, shared))
        if errors:
            raise errors[0]
        return meetings, overflows

    def _seniority(self, ranks: Ranks) -> int:
        """Return how many older optimizers of the same plan have no number yet."""
        if self._older(ranks):
            gc.collect()  # which ranks do at different times
        return self._older(ranks)

    def _older(self, ranks: Ranks) -> int:
        digest = self._digests.get(ranks)
        return sum(other._serial < self._serial and other._is_new(ranks, digest) for other in _LIVING)

    def _is_new(self, ranks: Ranks, digest: Optional[str]) -> bool:
        known = self._known.get(ranks)
        return self._digests.get(ranks) == digest and (known is None or known.digest != digest)


def read_all(terms: Mapping[Ranks, Terms]) -> None:
    """Raise RuntimeError, once, if those who share parameters were not at one when they met last; the host waits."""
    unread = [_UNREAD.pop(ranks) for ranks in sorted(terms) if ranks in _UNREAD]
    raise_disputes(meeting for world, meeting in unread if world() is dist.group.WORLD)


def _new_number(ranks: Ranks, terms: Terms) -> int:
    """Return a number that no optimizer of these ranks has; all of them must call it."""
    number = torch.tensor([_NUMBERS[ranks] + 1], dtype=torch.int64, device="cpu").to(terms.device)
    all_reduce_max_(number, ranks, "number of an optimizer", shortened(terms.names))
    _NUMBERS[ranks] = int(number.item())
    return _NUMBERS[ranks]
