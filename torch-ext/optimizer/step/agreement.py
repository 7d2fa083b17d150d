"""Whether ranks that share parameters take the same step: with equal settings, and with gradients of all copies.

They find out in the one small message that also says whether gradients overflow anywhere. It has one length for all
optimizers and plans, since those that meet may not belong together.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.settings import Group
from ..plan.agreement import Terms, difference_of_lines
from ..plan.process_groups import Ranks, all_reduce_sum_, gathered, shortened, this_rank


class Statement(NamedTuple):
    """What a rank says about what it does with shared parameters."""

    act: str  # such as `step 5`
    optimizer: str  # which of those of the same ranks
    has_met: bool  # these ranks before, with this plan
    digest: str  # of its plan
    settings: str
    absent: tuple[frozenset[str], ...]  # of each set of copies, the parameters without a gradient

    @property
    def identity(self) -> str:
        """What must be equal for messages to fit each other."""
        return f"{self.act} of {self.optimizer} with plan {self.digest[:12]}"

    def codes(self, terms: Terms) -> tuple[int, int, int]:
        """Return numbers that sum to 0 over the ranks if all do the same, with equal settings, and if copies agree."""
        identity, settings = (terms.weight * code_of(text) for text in (self.identity, self.settings))
        return identity, settings, code_of_copies(terms, [sorted(absent) for absent in self.absent])


def absent_of(terms: Terms, groups: Sequence[Group]) -> tuple[frozenset[str], ...]:
    """Return, for each set of copies, the parameters that have no gradient on this rank now."""

    def is_absent(i: int) -> bool:
        number, position = terms.places[i]
        return groups[number]["params"][position].grad is None

    return tuple(frozenset(terms.names[i] for i in each.positions if is_absent(i)) for each in terms.copies)


class Meeting:
    """What `ranks`, which share some parameters, tell each other about one step, or about what else they do together.

    On a CPU they know the result at once. From other devices it is read when it is asked for.
    """

    def __init__(self, ranks: Ranks, terms: Terms, statement: Statement):
        self._ranks, self._terms, self._statement = ranks, terms, statement
        self._names = shortened(terms.names)
        self._sums: Optional[Tensor] = None
        self._copied: Optional[torch.Event] = None

    def overflow(self, found_inf: Optional[Tensor]) -> Tensor:
        """Return, float32 (1), 1 if gradients overflow on any of the ranks or these are not at one, 0 if not.

        `found_inf` is what GradScaler says on this rank. All ranks must call it.
        """
        said = [0, *self._statement.codes(self._terms), int(not self._statement.has_met)]
        values = torch.tensor(said, dtype=torch.int64, device="cpu").to(self._terms.device, non_blocking=True)
        if found_inf is not None:
            values[:1].copy_(found_inf.reshape(1) != 0)
        all_reduce_sum_(values, self._ranks, self._statement.act, self._names)
        self._sums = values.to("cpu", non_blocking=True)
        if values.device.type != "cpu":
            self._copied = torch.Event(values.device)
            self._copied.record()
        return (values[:4] != 0).any().reshape(1).to(torch.float32)

    @property
    def is_known(self) -> bool:
        """Whether the result can be read without waiting for a device."""
        return self._copied is None

    def strangers(self, groups: Sequence[Group], compare_settings: bool) -> Optional[Exception]:
        """Return an error that says who does something else than the others; None where all do the same.

        Whether the settings of `groups` differ is told here if `compare_settings`. All ranks must call it.
        """
        is_other, has_settings, _ = self._differences()
        if not (is_other or (compare_settings and has_settings)):
            return None
        statements = self._statements()
        have_met = {statement.has_met for statement in statements.values()}
        if have_met != {True} and len({(its.digest, its.settings) for its in statements.values()}) > 1:
            lines = self._terms.with_settings(groups)
            return ValueError(difference_of_lines(self._ranks, lines, self._terms.device, self._names))
        return RuntimeError(self._in_words(statements))

    def dispute(self) -> Optional[str]:
        """Return what ranks are not at one about, None if they are; all of them must call it, and the host waits."""
        if not any(self._differences()):
            return None
        statements, (is_other, has_settings, _) = self._statements(), self._differences()
        if is_other:
            return self._in_words(statements)
        if has_settings:
            first, odd = _first_difference(statements, lambda statement: statement.settings)
            return (
                f"ranks had different settings for {self._names}: rank {first} had {statements[first].settings}, rank "
                f"{odd} had {statements[odd].settings}"
            )
        return _absent_copies(statements, self._terms)

    def all_are_new(self) -> bool:
        """Return whether none of the ranks has met the others with this plan; the host waits."""
        return self._result()[4] == len(self._ranks)

    def _differences(self) -> list[bool]:
        """Return whether ranks differ in what they do, in settings, and in what copies have gradients."""
        return [total != 0 for total in self._result()[1:4]]

    def _result(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._sums.tolist()

    def _in_words(self, statements: Mapping[int, Statement]) -> str:
        first, odd = _first_difference(statements, lambda statement: statement.identity)
        return (
            f"ranks do not do the same with {self._names}, and nothing that they share was changed: rank {first} was "
            f"in {statements[first].identity}, rank {odd} in {statements[odd].identity}"
        )

    def _statements(self) -> dict[int, Statement]:
        every = gathered(self._statement, self._ranks, self._statement.act, self._names)
        return dict(zip(self._ranks, every))


def raise_disputes(meetings: Iterable[Meeting]) -> None:
    """Raise RuntimeError, which says who differs and in what, if ranks that met were not at one."""
    disputes = [meeting.dispute() for meeting in meetings]  # all of them, as other ranks wait to be told
    disputes = [dispute for dispute in disputes if dispute]
    if disputes:
        raise RuntimeError(
            f"the ranks did not take the same step, and nothing that they share was changed: {'; '.join(disputes)}"
        )


def code_of_copies(terms: Terms, contents: Sequence[Any]) -> int:
    """Return a number that sums to 0 over the ranks if all copies of a part have the same content.

    `contents` are what this rank says of each set of `terms.copies`; their texts are compared.
    """
    entries = enumerate(zip(terms.copies, contents))
    return sum(copies.weight * code_of(f"{i} {copies.part} {content!r}") for i, (copies, content) in entries)


def code_of(text: str) -> int:
    """Return 40 bits that stand for a text, so that sums of thousands stay far below 2**63."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")


def _first_difference(statements: Mapping[int, Statement], aspect: Callable[[Statement], str]) -> tuple[int, int]:
    """Return the first rank, and the first one that differs from it in this aspect, the last one if none does."""
    first, *others = statements
    odd = (rank for rank in others if aspect(statements[rank]) != aspect(statements[first]))
    return first, next(odd, others[-1])


def _absent_copies(statements: Mapping[int, Statement], terms: Terms) -> str:
    """Return of which parameter some copies of a part had a gradient and others had none."""
    for number, copies in enumerate(terms.copies):
        absent = {rank: statements[rank].absent[number] for ranks in copies.sharers for rank in ranks}
        for name, ranks in itertools.product(sorted(set().union(*absent.values())), copies.sharers):
            without = [rank for rank in ranks if name in absent[rank]]
            if 0 < len(without) < len(ranks):
                having = [rank for rank in ranks if rank not in without]
                return f"of one part of {name}, ranks {having} had a gradient and ranks {without} had none"
    raise AssertionError(f"rank {this_rank()} was told of a difference that is none")
