"""What a rank reports of its next action to the ranks with which it shares parameters, and how reports differ."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from torch import Tensor

from ...parameters.settings import Group
from ...plan.process_groups import this_rank
from ...plan.terms import RankSets, Terms
from .checksums import code_of, code_of_sets

_GIVE_ZEROS = " for their parts: give them zeros before the step, p.grad = torch.zeros_like(p)"


class Statement(NamedTuple):
    """What a rank reports about its next action on shared parameters."""

    act: str  # such as `step`
    number: Optional[int]  # of the step among those that the ranks have taken together
    optimizer: str  # identifies it among the optimizers of the same ranks
    has_number: bool  # whether the ranks have met and numbered it, under any plan
    has_met: bool  # whether it has met these ranks before with this plan
    digest: str  # of its plan
    settings: str
    absent: tuple[frozenset[int], ...]  # for each entry of `_gradient_sets`, the parameters without a gradient
    redistributed: tuple[tuple[int, str], ...] = ()  # positions of parameters, and how their gradients lie
    grad_scale: Optional[float] = None  # only in statements that are gathered, because reading it may wait for a device

    @property
    def identity(self) -> str:
        """The text that must be equal on all ranks, or their messages do not match."""
        number = "" if self.number is None else f" {self.number}"
        return f"{self.act}{number} of {self.optimizer} with plan {self.digest[:12]}"

    def codes(self, terms: Terms) -> tuple[int, int, int]:
        """Return numbers whose sums over the ranks are 0 if actions, settings and gradients agree."""
        texts = self.identity, self.settings, repr(self.redistributed)
        identity, settings, redistributed = (terms.weight * code_of(text) for text in texts)
        return identity, settings, redistributed + code_of_sets(_gradient_sets(terms), list(map(sorted, self.absent)))


def absent_of(terms: Terms, groups: Sequence[Group]) -> tuple[frozenset[int], ...]:
    """Return, for each entry of `_gradient_sets`, which parameters of the terms have no gradient on this rank now.

    By their positions, because two may have one name.
    """

    def is_absent(i: int) -> bool:
        return terms.parameter(i, groups).grad is None

    return tuple(frozenset(filter(is_absent, each.positions)) for each in _gradient_sets(terms))


def redistributed_of(
    terms: Terms, groups: Sequence[Group], layouts: Mapping[Tensor, str]
) -> tuple[tuple[int, str], ...]:
    """Return the positions of those parameters of the terms that have `layouts`, each with its layout.

    `layouts` say of parameters how their gradients lie before this rank redistributes them.
    """
    if not layouts:
        return ()
    texts = (layouts.get(terms.parameter(i, groups)) for i in range(len(terms.names)))
    return tuple((i, text) for i, text in enumerate(texts) if text is not None)


def first_difference(statements: Mapping[int, Statement], aspect: Callable[[Statement], Any]) -> tuple[int, int]:
    """Return the first rank, and the first rank that differs from it in this aspect (the last rank if none does)."""
    first, *others = statements
    odd = (rank for rank in others if aspect(statements[rank]) != aspect(statements[first]))
    return first, next(odd, others[-1])


def difference_of_gradients(statements: Mapping[int, Statement], terms: Terms) -> str:
    """Return a text that names a parameter whose gradients differ between ranks, and how."""
    difference = _absent_somewhere(statements, terms) or _unlike_somewhere(statements, terms)
    if difference is None:
        raise AssertionError(f"rank {this_rank()} received a difference that does not exist")
    return difference


def _absent_somewhere(statements: Mapping[int, Statement], terms: Terms) -> Optional[str]:
    """Return a text that names a parameter that only some ranks of a set had a gradient of, if there is one."""
    for number, entry in enumerate(_gradient_sets(terms)):
        absent = {rank: statements[rank].absent[number] for ranks in entry.sets for rank in ranks}
        for position, ranks in itertools.product(sorted(set().union(*absent.values())), entry.sets):
            without = [rank for rank in ranks if position in absent[rank]]
            if 0 < len(without) < len(ranks):
                having = [rank for rank in ranks if rank not in without]
                is_copy = number < len(terms.copies)
                name, remedy = terms.names[position], "" if is_copy else _GIVE_ZEROS
                what = "one part of " if is_copy else ""
                return f"of {what}{name}, ranks {having} had a gradient and ranks {without} had none{remedy}"
    return None


def _unlike_somewhere(statements: Mapping[int, Statement], terms: Terms) -> Optional[str]:
    """Return a text that names a parameter whose gradients ranks would redistribute in unlike ways, if there is one."""
    first, odd = first_difference(statements, lambda statement: statement.redistributed)
    here, there = (dict(statements[rank].redistributed) for rank in (first, odd))
    unlike = [position for position in sorted({*here, *there}) if here.get(position) != there.get(position)]
    if not unlike:
        return None
    one, other = (each.get(unlike[0], "none, or one that lies like the parameter") for each in (here, there))
    return (
        f"ranks had unlike gradients of {terms.names[unlike[0]]}: rank {first} had {one}, rank {odd} had {other}; a "
        "gradient that the step redistributes must have one layout and one dtype on all ranks of its mesh"
    )


def _gradient_sets(terms: Terms) -> tuple[RankSets, ...]:
    """Return the parameters that need a gradient on all ranks of a set or on none."""
    return (*terms.copies, *terms.local_shards)
