"""Check that replicas of parameters and state are bit-identical: a flipped bit would persist and spread."""

from __future__ import annotations

import math
from typing import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...kernels.user_warnings import warn_user
from ...parameters.names import listed
from ...parameters.sequences import grouped
from ...parameters.settings import Group
from ...parameters.state import KEYS, State
from ...plan.exchange_options import NAME_THE_RANKS
from ...plan.layout import local_part
from ...plan.process_groups import Ranks, all_reduce_sum_, gathered, world_size
from ...plan.terms import RankSets, Terms
from .checksums import code_of_sets

# Integers by the size of an element.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The position of a parameter among those of the terms, and the name of one of its tensors.
Key = tuple[int, str]
Checksums = Mapping[Key, int]


def check_copies(terms: Mapping[Ranks, Terms], groups: Sequence[Group], state: State) -> None:
    """Raise RuntimeError if replicas differ in a bit of a parameter or of its state; all ranks must call it.

    Each tensor of which there are copies is read once, and the host waits for that. Ranks send one number; only where
    copies differ they send a sum for each tensor, by which the error names tensors and ranks. Warns where there are
    other ranks, and none of them is known to share a parameter.
    """
    if not terms and world_size() > 1:
        warn_user(
            "check_copies compares nothing: this optimizer knows of no other rank that has copies of its parameters. "
            f"{NAME_THE_RANKS}"
        )
    differences = differences_of_copies(terms, groups, state, with_frozen=True)
    if differences:
        raise RuntimeError(f"copies differ: {differences}")


def differences_of_copies(
    terms: Mapping[Ranks, Terms], groups: Sequence[Group], state: State, with_frozen: bool
) -> str:
    """Return which replicas differ, by tensors and ranks, "" if none do; without those of parameters that are frozen.

    All ranks must call it, as `check_copies`.
    """
    sentences: list[str] = []
    for ranks, shared in sorted(terms.items()):
        if shared.copies:
            sums = [_checksums(copies, shared, groups, state, with_frozen) for copies in shared.copies]
            sentences += _different_copies(ranks, shared, sums)
    rest = f", and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return f"{'; '.join(sentences[:3])}{rest}"


def _checksums(copies: RankSets, terms: Terms, groups: Sequence[Group], state: State, with_frozen: bool) -> Checksums:
    """Return a checksum of each tensor of which this rank has a replica."""
    parameters = [(position, terms.parameter(position, groups)) for position in copies.positions]
    compared = [(position, p) for position, p in parameters if with_frozen or p in state]
    keyed = [pair for position, p in compared for pair in _tensors(position, p, terms, state)]
    if not keyed:
        return {}
    sums = [_checksum(local_part(tensor)) for _, tensor in keyed]
    values = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    return {key: value for (key, _), value in zip(keyed, values)}


def _checksum(local: Tensor) -> Tensor:
    """Return a number, modulo 2**64, that follows from the bits of a tensor, which is read once; 0-d int64.

    It is the sum of about sqrt(n) sums of neighbouring integers, each times a different odd number: one changed
    integer always changes it; several nearly always do, unless neighbours swap places.
    """
    integers = _integers(local)
    count = max(math.isqrt(integers.numel()), 1)
    length = integers.numel() // count
    sums = integers[: count * length].view(count, length).sum(1, dtype=torch.int64)
    weights = torch.arange(1, 2 * count, 2, dtype=torch.int64, device=local.device)
    return (sums * weights).sum() + integers[count * length :].sum(dtype=torch.int64)


def _integers(local: Tensor) -> Tensor:
    """Return a tensor's elements as a 1-d tensor of integers, of eight bytes if possible: fewer to sum."""
    flat = local.reshape(-1)
    narrow = flat.view(_INTEGERS[flat.element_size()])
    if narrow.numel() * narrow.element_size() % 8:
        return narrow
    # Replicas may lie in memory differently.
    is_aligned = narrow.storage_offset() * narrow.element_size() % 8 == 0 == narrow.data_ptr() % 8
    return (narrow if is_aligned else narrow.clone()).view(torch.int64)


def _tensors(position: int, p: Tensor, terms: Terms, state: State) -> Iterator[tuple[Key, Tensor]]:
    """Yield a parameter and the tensors of its state, with the position and their names: two may have one name.

    What else is kept in the state, as by wrappers, may differ.
    """
    name = terms.names[position]
    yield (position, name), p.detach()
    for key, value in state.get(p, {}).items():
        if key in KEYS and isinstance(value, Tensor):
            yield (position, f"{key} of {name}"), value


def _different_copies(ranks: Ranks, terms: Terms, sums: Sequence[Checksums]) -> list[str]:
    """Return a sentence for each shard of a tensor that differs between replicas, with the ranks."""
    names = listed(terms.names)
    code = code_of_sets(terms.copies, [list(of_copy.items()) for of_copy in sums])
    total = torch.tensor([code], dtype=torch.int64, device="cpu").to(terms.device)
    all_reduce_sum_(total, ranks, "checksums of copies", names)
    if not total.item():
        return []
    of_all = dict(zip(ranks, gathered(sums, ranks, terms.device, "checksums of copies", names)))
    return [
        sentence
        for number, copies in enumerate(terms.copies)
        for holders in copies.sets
        for sentence in _differences({rank: of_all[rank][number] for rank in holders})
    ]


def _differences(sums: Mapping[int, Checksums]) -> Iterator[str]:
    """Yield a sentence for each tensor whose checksum differs between these ranks, which have replicas of it."""
    for key in dict.fromkeys(key for of_rank in sums.values() for key in of_rank):
        checksums = {rank: of_rank.get(key) for rank, of_rank in sums.items()}  # None: the tensor is not there
        most, *others = sorted(grouped(checksums, checksums.get), key=len, reverse=True)
        if others:
            yield f"{key[1]} differs between ranks {most} and {' and '.join(map(str, others))}"
