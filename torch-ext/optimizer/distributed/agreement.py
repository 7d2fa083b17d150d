"""Whether all ranks have made the same plan: a comparison of digests, and of the plans where those differ."""

from __future__ import annotations

import hashlib
from typing import Sequence

import torch
import torch.distributed as dist

from .placement import group_of


def check_agreement(ranks: tuple[int, ...], lines: Sequence[str], device: torch.device) -> None:
    """Raise ValueError on each of `ranks` unless all of them have the same `lines`, one for each parameter.

    The message names the first rank that differs from the first of `ranks`, and where. All ranks must call it.
    """
    group = group_of(ranks)
    digest = torch.frombuffer(bytearray(hashlib.sha256("\n".join(lines).encode()).digest()), dtype=torch.uint8)
    own = digest.to(device)
    found = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(found, own, group=group)
    if len({bytes(each.tolist()) for each in found}) == 1:
        return
    plans: list[list[str]] = [[] for _ in ranks]
    dist.all_gather_object(plans, list(lines), group=group)
    first = plans[0]
    rank, theirs = next((rank, plan) for rank, plan in zip(ranks, plans) if plan != first)
    here, there = _first_difference(first, theirs)
    raise ValueError(f"ranks disagree about what they update: rank {ranks[0]} has {here}, rank {rank} has {there}")


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for a, b in zip(ours, theirs):
        if a != b:
            return a, b
    longer = max(ours, theirs, key=len)
    extra = longer[min(len(ours), len(theirs))]
    return (extra, "nothing more") if longer is ours else ("nothing more", extra)
