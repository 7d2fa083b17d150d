"""Whether ranks that share parameters take the same step: with equal settings, and with gradients of all copies.

They find out before anything moves, in the one small message that also says whether gradients overflow anywhere. It has
one length for all optimizers, since those that meet may not belong together.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.settings import Group
from ..plan.agreement import Terms, check_agreement, count_optimizer
from ..plan.process_groups import Ranks, all_reduce_sum_, gathered, shortened, this_rank
from ..rules.scaling import GradientScaling


class Statement(NamedTuple):
    """What a rank says about its step: which one it is, with which settings, and what it has no gradient of."""

    optimizer: str  # which of those of the same ranks, and the digest of its plan
    step: int
    settings: str
    absent: tuple[frozenset[str], ...]  # of each set of copies, the parameters without a gradient

    def codes(self, terms: Terms) -> tuple[int, int]:
        """Return two numbers that sum to 0 over the ranks if these are in the same step, and if copies are at one."""
        step = terms.weight * code_of(f"{self.optimizer} {self.step} {self.settings}")
        return step, code_of_copies(terms, [sorted(absent) for absent in self.absent])


def statement_of(terms: Terms, groups: Sequence[Group], optimizer: str, step: int) -> Statement:
    """Return what this rank says about a step of the shared parameters, by their gradients as they are now."""

    def is_absent(i: int) -> bool:
        number, position = terms.places[i]
        return groups[number]["params"][position].grad is None

    absent = (frozenset(terms.names[i] for i in each.positions if is_absent(i)) for each in terms.copies)
    return Statement(f"{optimizer} of plan {terms.digest[:12]}", step, terms.settings(groups), tuple(absent))


class StepAgreement:
    """What `ranks`, which share some parameters, tell each other in one step.

    Where they are not at one the step changes nothing that they share, as where gradients overflow. On a CPU they know
    at once. From other devices the result is read when the next step begins, so that this one never waits for them.
    """

    def __init__(self, ranks: Ranks, terms: Terms, statement: Statement):
        self._ranks, self._terms, self._statement = ranks, terms, statement
        self._disputed: Optional[Tensor] = None
        self._copied: Optional[torch.Event] = None

    def overflow(self, found_inf: Optional[Tensor]) -> Tensor:
        """Return, float32 (1), 1 if gradients overflow on any of the ranks or these are not at one, 0 if not.

        `found_inf` is what GradScaler says on this rank. All ranks must call it.
        """
        codes = self._statement.codes(self._terms)
        values = torch.tensor([0, *codes], dtype=torch.int64, device="cpu").to(self._terms.device, non_blocking=True)
        if found_inf is not None:
            values[:1].copy_(found_inf.reshape(1) != 0)
        all_reduce_sum_(values, self._ranks, "settings", shortened(self._terms.names))
        disputed = (values[1:] != 0).any().reshape(1)
        self._disputed = disputed.to("cpu", non_blocking=True)
        if disputed.device.type != "cpu":
            self._copied = torch.Event(disputed.device)
            self._copied.record()
        return (values != 0).any().reshape(1).to(torch.float32)

    @property
    def is_known(self) -> bool:
        """Whether the result can be read without waiting for a device."""
        return self._copied is None

    def dispute(self) -> Optional[str]:
        """Return what the ranks were not at one about, None if they were; all of them must call it."""
        if self._copied is not None:
            self._copied.synchronize()
        if not self._disputed.item():
            return None
        names = shortened(self._terms.names)
        statements = dict(zip(self._ranks, gathered(self._statement, self._ranks, "settings", names)))
        return _difference(statements, names) or _absent_copies(statements, self._terms)


class RankAgreement:
    """What an optimizer and those of other ranks, with which it shares parameters, agree about from step to step."""

    def __init__(self):
        self._numbers: dict[Ranks, int] = {}
        self._steps = 0
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"_numbers": self._numbers, "_steps": self._steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def forget(self) -> None:
        """Compare plans anew before the next step, and let go of what is not checked yet."""
        self._compared: Mapping[Ranks, Sequence[str]] = {}
        self._unchecked: Sequence[StepAgreement] = ()

    def count_optimizer(self, terms: Mapping[Ranks, Terms]) -> None:
        """Take this optimizer's number among those of the same ranks: ranks make theirs in one order."""
        self._numbers = {ranks: count_optimizer(ranks) for ranks in terms}

    def compare_plans(self, terms: Mapping[Ranks, Terms], groups: Sequence[Group]) -> None:
        """Raise ValueError unless all ranks that share parameters have made the same plan since they last compared."""
        # By the fixed lines only: a scheduler's change on one rank would have it start a collective alone.
        fixed = {ranks: shared.fixed for ranks, shared in terms.items()}
        if fixed != self._compared:
            for ranks, shared in sorted(terms.items()):
                common_line, *lines = shared.with_settings(groups)
                lines = [f"{self._which(ranks)}: {common_line}", *lines]
                check_agreement(ranks, lines, shared.device, shortened(shared.names))
            self._compared = fixed

    def scalings(
        self, terms: Mapping[Ranks, Terms], groups: Sequence[Group], scaling: GradientScaling
    ) -> dict[Optional[Ranks], GradientScaling]:
        """Return `scaling` for each set of ranks that share parameters; all of them must call it, once in a step.

        Gradients overflow for all of them or for none. The scaling of None is for this process alone. Raises as
        `check` where it can be told at once.
        """
        self._steps += 1
        scalings: dict[Optional[Ranks], GradientScaling] = {None: scaling}
        agreements = []
        for ranks, shared in sorted(terms.items()):
            agreement = StepAgreement(ranks, shared, statement_of(shared, groups, self._which(ranks), self._steps))
            scalings[ranks] = scaling._replace(found_inf=agreement.overflow(scaling.found_inf))
            agreements.append(agreement)
        self._unchecked = [agreement for agreement in agreements if not agreement.is_known]
        _raise_disputes([agreement for agreement in agreements if agreement.is_known])
        return scalings

    def check(self) -> None:
        """Raise RuntimeError, once, which says who differs and in what, if ranks were not at one in the last step."""
        unchecked, self._unchecked = self._unchecked, ()
        _raise_disputes(unchecked)

    def _which(self, ranks: Ranks) -> str:
        number = self._numbers.get(ranks)
        return "an optimizer made before its parameters were shared" if number is None else f"optimizer {number}"


def _raise_disputes(agreements: Sequence[StepAgreement]) -> None:
    disputes = [agreement.dispute() for agreement in agreements]  # all of them, as other ranks wait to be told
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


def _difference(statements: Mapping[int, Statement], names: str) -> Optional[str]:
    """Return how a rank's step or settings differ from the first one's."""
    (first, expected), *others = statements.items()
    for rank, statement in others:
        if (statement.optimizer, statement.step) != (expected.optimizer, expected.step):
            return (
                f"of {names}, rank {first} was in step {expected.step} of {expected.optimizer} and rank {rank} in step "
                f"{statement.step} of {statement.optimizer}"
            )
        if statement.settings != expected.settings:
            return (
                f"ranks had different settings for {names}: rank {first} had {expected.settings}, rank {rank} had "
                f"{statement.settings}"
            )
    return None


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
