"""Agreement of an optimizer with its counterparts on other ranks: which ones belong together, and that all continue."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from typing import Iterable, Mapping, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...parameters.names import listed
from ...parameters.settings import Group
from ...parameters.state import State
from ...plan.process_groups import Ranks, all_reduce_max_, offer_groups
from ...plan.terms import Terms
from ...rules.scaling import UNSCALED, GradientScaling, Scalings
from .copies import differences_of_copies
from .meeting import Meeting, raise_disputes
from .statement import Statement, absent_of, redistributed_of
from .unread_meetings import forget_unread, keep_unread, read_all

_SERIALS = itertools.count()
_LIVING: weakref.WeakSet[RankAgreement] = weakref.WeakSet()
# The largest number that an optimizer of these ranks has received.
_NUMBERS: Counter[Ranks] = Counter()


class Registration(NamedTuple):
    """The number that some ranks gave an optimizer at their first meeting, and the plan with which they met last."""

    digest: str
    number: int


class RankAgreement:
    """Agreement of one optimizer with the optimizers on other ranks that share its parameters.

    When ranks meet for the first time, they give the optimizer a number, which it keeps when its plan changes. The
    number distinguishes optimizers of similar parameters, such as an actor's and a critic's. At the first meeting the
    order of construction decides: among the living optimizers with this plan and without a number, it has the same
    place on all ranks.
    """

    def __init__(self, digests: Optional[Mapping[Ranks, str]] = None):
        self._serial = next(_SERIALS)
        self._groups: Sequence[weakref.ref] = ()  # of a new plan's meshes, until ranks meet
        self._digests = dict(digests or {})  # of its plan, for each set of ranks
        self.forget()
        _LIVING.add(self)

    def __reduce__(self):
        return RankAgreement, (self._digests,)  # a copy is another optimizer

    def forget(self) -> None:
        """Forget the other ranks, so that the next meeting is a first one."""
        self._registered: dict[Ranks, Registration] = {}
        self._steps: Counter[Ranks] = Counter()  # that each set of ranks has taken together
        self._compared: set[Ranks] = set()  # sets of ranks that have compared their copies
        self._meetings: Sequence[Meeting] = ()  # of the last step, in the order of their ranks

    def follow(self, terms: Mapping[Ranks, Terms], groups: Iterable[dist.ProcessGroup]) -> None:
        """Store the digests of a new plan, and the process `groups` of its meshes, in which ranks may meet."""
        self._groups = list(map(weakref.ref, groups))
        self._digests = {ranks: shared.digest for ranks, shared in terms.items()}

    def meet(self, act: str, terms: Mapping[Ranks, Terms], groups: Sequence[Group]) -> None:
        """Raise ValueError or RuntimeError unless all ranks that share parameters do `act` with the same plan."""
        meetings, _ = self._meet(act, terms, groups, UNSCALED, {})
        read_all(terms)
        raise_disputes(meetings)

    def begin_step(
        self,
        terms: Mapping[Ranks, Terms],
        groups: Sequence[Group],
        scaling: GradientScaling,
        layouts: Mapping[Tensor, str],
    ) -> Scalings:
        """Return `scaling` as agreed by each set of ranks that share parameters; all of them must call it.

        `layouts` say of some parameters how their gradients lie before the step redistributes them.
        Gradients overflow on all ranks of a set or on none. If ranks disagree, their gradients count as overflowing, so
        nothing that they share changes; `end_step` reports it. Raises the errors of `meet`.
        """
        self._meetings, overflows = self._meet("step", terms, groups, scaling, layouts)
        shared = {ranks: scaling._replace(found_inf=overflow) for ranks, overflow in overflows.items()}
        return Scalings({None: scaling, **shared})

    def compare_copies(self, groups: Sequence[Group], state: State) -> None:
        """Raise RuntimeError if the copies of parameters or state differ between ranks that begin their first step.

        One rank alone may have loaded a state, or made other weights. Ranks that disagree, such as one that loads
        between the steps of others, do not wait for each other: they compare at the next step. Later ones compare
        nothing.
        """
        waiting = [meeting for meeting in self._meetings if meeting.ranks not in self._compared]
        terms = {meeting.ranks: meeting.terms for meeting in waiting if meeting.agrees()}
        differences = differences_of_copies(terms, groups, state, with_frozen=False) if terms else ""
        errors: list[Exception] = []
        if differences:
            errors.append(
                RuntimeError(
                    f"copies differ: {differences}. Nothing was changed. At the first step, and at the first one after "
                    "a load, all copies must be equal: load the same files on all ranks, or send the tensors of one "
                    "rank to the others. Parameters that each rank has for itself need an optimizer without `exchange`"
                )
            )
        # Ranks that disagree are asked, too: else they would update what they share with further ranks.
        here = [(meeting.ranks, meeting.terms) for meeting in waiting if meeting.is_of_one_step()]
        errors += _errors_elsewhere(here, bool(errors))
        if errors:
            for ranks, _ in here:
                forget_unread(ranks)  # these ranks have an error already, but in the chains that were named
            raise errors[0]
        self._compared.update(terms)

    def skipping(self) -> set[Ranks]:
        """Return the sets of ranks all of which know by now that this step changes nothing that they share."""
        return {meeting.ranks for meeting in self._meetings if meeting.all_know_it_is_skipped()}

    def count_step(self) -> None:
        """Count the step. If a rank fails before it counts, the next meeting finds that others have counted more."""
        for meeting in self._meetings:
            meeting.count_(self._steps)

    def end_step(self, released: bool) -> None:
        """Raise RuntimeError, which names the ranks and the difference, if it is already known that ranks disagreed.

        If gradients were `released`, it says so: another step without a backward pass would lack them.
        """
        known = [meeting for meeting in self._meetings if meeting.is_known]
        raise_disputes(
            known, "; release_grads=True has freed gradients: run the backward pass again" if released else ""
        )

    def _meet(
        self,
        act: str,
        terms: Mapping[Ranks, Terms],
        groups: Sequence[Group],
        scaling: GradientScaling,
        layouts: Mapping[Tensor, str],
    ) -> tuple[list[Meeting], dict[Ranks, Tensor]]:
        """Compare `act` among all ranks that share parameters; return the meetings, and overflows by ranks."""
        read_all(terms)
        # Not when it is planned: a rank may make or plan some optimizer that the others do not, but here all meet.
        offer_groups(group for group in (reference() for reference in self._groups) if group is not None)
        self._groups = ()  # once for a plan: its ranks meet in the same groups from here on
        meetings, overflows, errors, first_met, registered = [], {}, [], [], {}
        for ranks, shared in sorted(terms.items()):
            statement = self._statement(act, ranks, shared, groups, layouts)
            meeting = Meeting(ranks, shared, statement)
            overflows[ranks] = meeting.overflow(scaling)
            meetings.append(meeting)
            if meeting.all_are_new():
                first_met.append((ranks, shared))
            elif not meeting.is_known:
                keep_unread(meeting)
                continue
            error = meeting.mismatch(groups, not statement.has_met)
            if error is not None:  # raised after the loop, so that no other rank waits
                errors.append(error)
            elif not statement.has_met:
                number = self._registered[ranks].number if statement.has_number else _new_number(ranks, shared)
                registered[ranks] = Registration(shared.digest, number)
        errors += _errors_elsewhere(first_met, bool(errors))
        if errors:
            raise errors[0]
        self._registered.update(registered)  # only now: a mistake that is repeated stops the same ranks again
        for meeting in meetings:
            if not meeting.is_known:
                keep_unread(meeting)
        return meetings, overflows

    def _statement(
        self, act: str, ranks: Ranks, shared: Terms, groups: Sequence[Group], layouts: Mapping[Tensor, str]
    ) -> Statement:
        """Return what this rank tells others of `ranks`: what it does, with which optimizer, settings and gradients."""
        known, is_step = self._registered.get(ranks), act == "step"
        return Statement(
            act,
            number=self._steps[ranks] + 1 if is_step else None,
            optimizer=f"new optimizer {self._seniority(ranks)}" if known is None else f"optimizer {known.number}",
            has_number=known is not None,
            has_met=known is not None and known.digest == shared.digest,
            digest=shared.digest,
            settings=shared.settings(groups),
            absent=absent_of(shared, groups) if is_step else (),
            redistributed=redistributed_of(shared, groups, layouts),
        )

    def _seniority(self, ranks: Ranks) -> int:
        """Return how many older optimizers of the same plan have no number yet."""
        if self._older(ranks):
            gc.collect()  # ranks collect dead optimizers at different times
        return self._older(ranks)

    def _older(self, ranks: Ranks) -> int:
        digest = self._digests.get(ranks)
        return sum(other._serial < self._serial and other._is_new(ranks, digest) for other in _LIVING)

    def _is_new(self, ranks: Ranks, digest: Optional[str]) -> bool:
        return self._digests.get(ranks) == digest and ranks not in self._registered


def _errors_elsewhere(sets: Sequence[tuple[Ranks, Terms]], has_failed: bool) -> list[Exception]:
    """Return an error for each of these sets of ranks, with their terms, in which another rank has an error.

    Otherwise this rank would update what they share, and the other one would not. All of them must call it. Sets are
    asked in order and back: of the sets (0, 1), (0, 2) and (2, 3), an error in the last one reaches the first as well.
    That reaches everybody on the axes of a mesh. In longer chains of sets some ranks may wait until their timeout.
    """
    errors: list[Exception] = []
    for ranks, shared in (*sets, *reversed(sets)):
        failed = torch.tensor([has_failed or bool(errors)], dtype=torch.int64, device="cpu").to(shared.device)
        all_reduce_max_(failed, ranks, "errors of other ranks", listed(shared.names))
        if failed.item():
            errors.append(
                ValueError(
                    f"a rank that shares {listed(shared.names)} has met an error about what it shares with further "
                    "ranks: its message says what to change. Nothing was changed here either"
                )
            )
    return errors


def _new_number(ranks: Ranks, terms: Terms) -> int:
    """Return a number that no other optimizer of these ranks has; all of them must call it."""
    number = torch.tensor([_NUMBERS[ranks] + 1], dtype=torch.int64, device="cpu").to(terms.device)
    all_reduce_max_(number, ranks, "number of an optimizer", listed(terms.names))
    _NUMBERS[ranks] = int(number.item())
    return _NUMBERS[ranks]
