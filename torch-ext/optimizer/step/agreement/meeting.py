"""Check that ranks which share parameters take the same step.

They must have equal settings, gradients on all replicas or on none, and the same gradient scale. The check is part of
the small message that also reports overflow of gradients. The message has the same length for all optimizers and plans,
because ranks with different ones may meet by mistake.
"""

from __future__ import annotations

from collections import Counter
from typing import Iterable, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ...kernels.host_copy import HostCopy, moved
from ...parameters.names import listed
from ...parameters.settings import Group
from ...plan.process_groups import Ranks, all_reduce_sum_, gathered
from ...plan.terms import Terms
from ...rules.scaling import GradientScaling
from .checksums import codes_of_scales
from .differences import difference_of_lines, difference_of_settings
from .statement import Statement, difference_of_gradients, first_difference


class Sums(NamedTuple):
    """Sums over the ranks of a meeting. Those of codes are 0 if all ranks have the same."""

    overflows: int  # ranks whose gradients overflow
    scales: int  # codes of the gradient scale
    actions: int
    settings: int
    gradients: int  # codes of which parameters have one, and of those that are redistributed
    new: int  # ranks that have not met the others with this plan

    @property
    def disagree(self) -> bool:
        """Whether ranks do not do the same."""
        return any((self.scales, self.actions, self.settings, self.gradients))


class Meeting:
    """The exchange in which `ranks` that share parameters compare one step, or another common action.

    On a CPU the result is known at once. On other devices it is read back only when it is needed.
    """

    def __init__(self, ranks: Ranks, terms: Terms, statement: Statement):
        self.ranks, self.terms, self._statement = ranks, terms, statement
        self.is_told = False  # whether the user has heard that the ranks disagreed
        self._counted_in: Counter[Ranks] = Counter()
        self._names = listed(terms.names)
        self._grad_scale: Optional[Tensor] = None
        self._sums: Optional[HostCopy] = None

    def overflow(self, scaling: GradientScaling) -> Tensor:
        """Return, as float32 (1), 1 if gradients overflow on any rank or the ranks disagree, else 0.

        `scaling` is what GradScaler says on this rank. All ranks must call it.
        """
        here = Sums(0, 0, *self._statement.codes(self.terms), int(not self._statement.has_met))
        values = moved(torch.tensor(here, dtype=torch.int64, device="cpu"), self.terms.device)
        if scaling.found_inf is not None:
            values[:1].copy_(scaling.found_inf.reshape(1) != 0)
        if scaling.grad_scale is not None:
            self._grad_scale = scaling.grad_scale.reshape(1).to(values.device, torch.float32, copy=True)
            values[1:2].copy_(codes_of_scales(self._grad_scale)).mul_(self.terms.weight)
        all_reduce_sum_(values, self.ranks, self._statement.act, self._names)
        self._sums = HostCopy(values)
        return (values[:-1] != 0).any().reshape(1).to(torch.float32)  # all but `new`

    def count_(self, steps: Counter[Ranks]) -> None:
        """Count a step of these ranks in `steps`; it is taken off again when it turns out that they disagreed."""
        steps[self.ranks] += 1
        self._counted_in = steps

    @property
    def is_known(self) -> bool:
        """Whether the result can be read without waiting for a device."""
        return self._sums.is_known

    def mismatch(self, groups: Sequence[Group], compare_settings: bool) -> Optional[Exception]:
        """Return an error that names the ranks that do something else than the others; None if all do the same.

        With `compare_settings`, different settings of `groups` are an error too. All ranks must call it.
        """
        sums = self._result()
        if not (sums.actions or (compare_settings and sums.settings)):
            return None
        statements = self._statements()
        have_met = {statement.has_met for statement in statements.values()}
        plans = {(statement.digest, statement.settings) for statement in statements.values()}
        if have_met != {True} and len(plans) > 1:
            lines = self.terms.with_settings(groups)
            return ValueError(difference_of_lines(self.ranks, lines, self.terms.device, self._names))
        return RuntimeError(self._in_words(statements))

    def dispute(self) -> Optional[str]:
        """Return a text on what ranks disagree about, and take the step off its count; None if they agree.

        All must call it, and the host waits.
        """
        sums = self._result()
        if not sums.disagree:
            return None
        self._counted_in[self.ranks] -= 1
        statements = self._statements()
        if sums.actions:
            return self._in_words(statements)
        if sums.settings:
            first, odd = first_difference(statements, lambda statement: statement.settings)
            return difference_of_settings(self.terms, {rank: statements[rank].settings for rank in (first, odd)})
        if sums.scales:
            first, odd = first_difference(statements, lambda statement: statement.grad_scale)
            one, other = (statements[rank].grad_scale for rank in (first, odd))
            return (
                f"ranks had different gradient scales for {self._names}: rank {first} had {one}, rank {odd} had "
                f"{other}; give all scalers one scale with scaler.update(new_scale)"
            )
        return difference_of_gradients(statements, self.terms)

    def all_are_new(self) -> bool:
        """Return whether none of the ranks has met the others with this plan; the host waits if this one has not."""
        return not self._statement.has_met and self._result().new == len(self.ranks)

    def all_know_it_is_skipped(self) -> bool:
        """Return whether all ranks know by now that gradients overflow or ranks disagree, so that nothing changes."""
        is_known_to_all = self.is_known or self.all_are_new()
        return is_known_to_all and any(self._result()[:-1])

    def agrees(self) -> bool:
        """Return whether all ranks do the same; the host waits."""
        return not self._result().disagree

    def is_of_one_step(self) -> bool:
        """Return whether all ranks are in the same step of the same optimizer; the host waits."""
        return not self._result().actions

    def _result(self) -> Sums:
        return Sums(*self._sums.read())

    def _in_words(self, statements: Mapping[int, Statement]) -> str:
        """Return which ranks act differently from each other, and what to do about it."""
        first, odd = first_difference(statements, lambda statement: statement.identity)
        numbered = {rank: statements[rank].has_number for rank in (first, odd)}
        hint = ""
        if not any(numbered.values()):
            hint = ": make the same optimizers on all ranks, in the same order; copies by copy.deepcopy count, too"
        elif not all(numbered.values()):
            new = odd if numbered[first] else first
            hint = f": rank {new} has loaded a state, or has a new optimizer. Do the same on all ranks"
        elif len({statements[rank]._replace(number=None).identity for rank in (first, odd)}) == 1:
            hint = (
                ": one has taken a step in which the other had an error, so what they share differs. Load model and "
                "optimizer from one checkpoint on all ranks"
            )
        return (
            f"ranks do not do the same with {self._names}, and nothing that they share was changed: rank {first} was "
            f"in {statements[first].identity}, rank {odd} in {statements[odd].identity}{hint}"
        )

    def _statements(self) -> dict[int, Statement]:
        scale = None if self._grad_scale is None else self._grad_scale.item()
        statement = self._statement._replace(grad_scale=scale)
        statements = gathered(statement, self.ranks, self.terms.device, statement.act, self._names)
        return dict(zip(self.ranks, statements))


def raise_disputes(meetings: Iterable[Meeting], cure: str = "") -> None:
    """Raise RuntimeError, which names the ranks, the difference and the `cure`, if ranks disagreed in a meeting."""
    disputes = [meeting.dispute() for meeting in meetings]  # all of them, because other ranks wait for each
    disputes = [dispute for dispute in disputes if dispute]
    if disputes:
        raise RuntimeError(
            f"the ranks did not take the same step, and nothing that they share was changed: {'; '.join(disputes)}"
            f"{cure}"
        )
