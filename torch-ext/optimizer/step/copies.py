"""Whether copies of parameters and state still have the same bits: a flipped one would stay, and spread."""

from __future__ import annotations

from typing import Iterator, Mapping, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.settings import Group
from ..plan.agreement import Copies, Terms
from ..plan.layout import local_part
from ..plan.plan import State
from ..plan.process_groups import Ranks, all_reduce_sum_, gathered, shortened
from .agreement import code_of_copies

# Integers of the same size. Their sum is exact, or exact modulo 2**64: one flipped bit always changes it.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = Mapping[str, int]


def check_copies(terms: Mapping[Ranks, Terms], groups: Sequence[Group], state: State) -> None:
    """Raise RuntimeError where copies differ in a bit of a parameter or of its state; all ranks must call it.

    Each tensor of which there are copies is read once, and the host waits for that. Ranks send one number; only where
    copies differ they send a sum for each tensor, by which the error names tensors and ranks.
    """
    disputes: list[str] = []
    for ranks, shared in sorted(terms.items()):
        if shared.copies:
            sums = [_sums(copies, shared, groups, state) for copies in shared.copies]
            disputes += _different_copies(ranks, shared, sums)
    if disputes:
        rest = f", and {len(disputes) - 3} more" if len(disputes) > 3 else ""
        raise RuntimeError(f"copies have drifted apart: {'; '.join(disputes[:3])}{rest}")


def _sums(copies: Copies, terms: Terms, groups: Sequence[Group], state: State) -> Sums:
    """Return the sum of the bits of each tensor of which this rank has a copy, by its name."""
    named = [pair for position in copies.positions for pair in _tensors(position, terms, groups, state)]
    if not named:
        return {}
    sums = [_bits(local_part(tensor)).sum(dtype=torch.int64) for _, tensor in named]
    values = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    return {name: value for (name, _), value in zip(named, values)}


def _bits(local: Tensor) -> Tensor:
    """Return a tensor's memory as integers, as the largest that fit: fewer are summed sooner."""
    if local.is_contiguous() and local.numel() * local.element_size() % 8 == 0 and local.data_ptr() % 8 == 0:
        return local.view(-1).view(torch.int64)
    return local.view(_INTEGERS[local.element_size()])


def _tensors(position: int, terms: Terms, groups: Sequence[Group], state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter and the tensors of its state, with their names."""
    name, (group, place) = terms.names[position], terms.places[position]
    p = groups[group]["params"][place]
    yield name, p.detach()
    for key, value in state.get(p, {}).items():
        if isinstance(value, Tensor):
            yield f"{key} of {name}", value


def _different_copies(ranks: Ranks, terms: Terms, sums: Sequence[Sums]) -> list[str]:
    """Return which tensors differ between copies, and on which ranks, a sentence for each part of a tensor."""
    names = shortened(terms.names)
    code = torch.tensor([code_of_copies(terms, [list(its.items()) for its in sums])], dtype=torch.int64, device="cpu")
    total = code.to(terms.device)
    all_reduce_sum_(total, ranks, "checksums of copies", names)
    if not total.item():
        return []
    of_all = dict(zip(ranks, gathered(sums, ranks, "checksums of copies", names)))
    return [
        sentence
        for number, copies in enumerate(terms.copies)
        for sharers in copies.sharers
        for sentence in _differences({rank: of_all[rank][number] for rank in sharers})
    ]


def _differences(sums: Mapping[int, Sums]) -> Iterator[str]:
    """Yield a sentence for each tensor of which these ranks, who have copies, do not have the same sum."""
    for name in dict.fromkeys(name for its in sums.values() for name in its):
        by_sum: dict[Optional[int], list[int]] = {}  # None: the tensor is not there
        for rank, its in sums.items():
            by_sum.setdefault(its.get(name), []).append(rank)
        if len(by_sum) > 1:
            most, *others = sorted(by_sum.values(), key=len, reverse=True)
            yield f"{name} on ranks {most} is not what it is on {' and on '.join(map(str, others))}"
