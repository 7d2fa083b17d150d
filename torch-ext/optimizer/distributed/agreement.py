"""Whether ranks that share parameters agree: about the plan before the first step, about settings at every step."""

from __future__ import annotations

import hashlib
import zlib
from contextlib import contextmanager
from typing import Iterator, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .placement import group_of, this_rank

# How many codes there are for settings: with a sign, they are integers that bfloat16 holds.
_CODES = 255


def check_agreement(ranks: tuple[int, ...], lines: Sequence[str], device: torch.device) -> None:
    """Raise ValueError on each of `ranks` unless all of them have the same `lines`, one for each parameter.

    The message names the first rank that differs from the first of `ranks`, and where. All ranks must call it.
    """
    group = group_of(ranks)
    digest = torch.frombuffer(bytearray(hashlib.sha256("\n".join(lines).encode()).digest()), dtype=torch.uint8)
    own = digest.to(device)
    found = [torch.empty_like(own) for _ in ranks]
    with waiting("plans"):
        dist.all_gather(found, own, group=group)
        digests = torch.stack(found).cpu()
        others = (digests != digests[0]).any(1).nonzero().flatten().tolist()
        if not others:
            return
        odd = ranks[others[0]]
        plans = [_broadcast(lines, rank, group, device) for rank in (ranks[0], odd)]
    here, there = _first_difference(*plans)
    raise ValueError(f"ranks disagree about what they update: rank {ranks[0]} has {here}, rank {odd} has {there}")


def take_largest_(values: Tensor, ranks: tuple[int, ...], what: str) -> None:
    """Make each of `values`, which `what` names, the largest that one of `ranks` has; all of them must call it."""
    with waiting(what):
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group_of(ranks))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say in the error of a collective that failed who waited, and for what of the other ranks."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {this_rank()} waits in vain for the other ranks' {what}: one has died, is late, or has gone another "
            f"way ({error})"
        ) from error


class Accord:
    """Whether all ranks of an exchange take a step with the same settings, which schedulers move: they send a code.

    `settings` are this rank's. What they differ about is left alone; nobody waits for the device to hear of it, so
    that it is told when the next step begins. Different settings have the same code in one of 255 steps, counted by
    `turn`.
    """

    def __init__(self, settings: str, turn: int):
        self._settings = settings
        self.code = zlib.crc32(f"{turn} {settings}".encode()) % _CODES + 1
        self._names: list[Sequence[str]] = []
        self._verdicts: list[Tensor] = []
        self._disputed: Optional[Tensor] = None
        self._copied: Optional[torch.Event] = None

    def note(self, names: Sequence[str], verdicts: Tensor) -> None:
        """Note what owners say of a chunk's parameters, of these names: below zero where settings differ."""
        self._names.append(names)
        self._verdicts.append((verdicts < 0).any())

    def close(self) -> None:
        """Send all that was noted on its way to the host."""
        if self._verdicts:
            disputed = torch.stack(self._verdicts)
            self._disputed = disputed.to("cpu", non_blocking=True)
            if disputed.device.type != "cpu":
                self._copied = torch.Event(disputed.device)
                self._copied.record()

    def check(self) -> None:
        """Raise RuntimeError if settings differed."""
        if self._disputed is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        names = [name for own, disputed in zip(self._names, self._disputed.tolist()) if disputed for name in own]
        if names:
            raise RuntimeError(
                f"in the last step not all ranks had the same settings for {shortened(names)}, or of two copies only "
                f"one had a gradient; what that holds for was left alone. Rank {this_rank()} had {self._settings}"
            )


def shortened(names: Sequence[str]) -> str:
    """Return the first three names."""
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


def _broadcast(lines: Sequence[str], rank: int, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Return the lines that `rank` has."""
    found: list[Optional[list[str]]] = [list(lines)]
    dist.broadcast_object_list(found, src=rank, group=group, device=device)
    return found[0]


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for a, b in zip(ours, theirs):
        if a != b:
            return a, b
    longer = max(ours, theirs, key=len)
    extra = longer[min(len(ours), len(theirs))]
    return (extra, "nothing more") if longer is ours else ("nothing more", extra)
