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
    """Whether ranks that share parameters take a step with the same settings, which schedulers and users move.

    They tell each other a code of theirs; where codes differ the step changes nothing, as where gradients overflow.
    Nobody waits for the device to hear of it, so that it is told when the next step begins. `settings` are this rank's,
    for the parameters of these `names`.
    """

    def __init__(self, settings: str, names: Sequence[str]):
        self._settings, self._names = settings, names
        self._doubts: list[tuple[Optional[Sequence[str]], Tensor]] = []  # None: settings
        self._found: Optional[Tensor] = None
        self._copied: Optional[torch.Event] = None

    def agree(self, ranks: tuple[int, ...], found_inf: Optional[Tensor], device: torch.device) -> Tensor:
        """Return, float32 (1), 1 if gradients overflow on any of `ranks` or their settings differ, 0 if not.

        `found_inf` is what GradScaler says on this rank. All ranks must call it.
        """
        code = float(zlib.crc32(self._settings.encode()) % 2**24)  # which float32 holds
        values = torch.tensor([code, -code, 0.0], dtype=torch.float32).to(device, non_blocking=True)
        if found_inf is not None:
            values[2:].copy_(found_inf.reshape(1))
        take_largest_(values, ranks, f"settings for {shortened(self._names)}")
        differ = values[:1] != -values[1:2]
        self._doubts.append((None, differ))
        return torch.maximum(values[2:], differ.float())

    def note(self, names: Sequence[str], verdicts: Tensor) -> None:
        """Note what owners say of matrices, of parameters of these names: below zero where copies are at odds."""
        self._doubts.append((names, (verdicts < 0).any().reshape(1)))

    def close(self) -> None:
        """Send all that was found on its way to the host."""
        found = torch.cat([doubt for _, doubt in self._doubts])
        self._found = found.to("cpu", non_blocking=True)
        if found.device.type != "cpu":
            self._copied = torch.Event(found.device)
            self._copied.record()

    def check(self) -> None:
        """Raise RuntimeError if ranks were not at one in the step that is closed."""
        if self._found is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        doubted = [names for (names, _), found in zip(self._doubts, self._found.tolist()) if found]
        if None in doubted:
            raise RuntimeError(
                f"in the last step ranks had different settings for {shortened(self._names)}, and nothing that they "
                f"share was changed: rank {this_rank()} had {self._settings}"
            )
        if doubted:
            names = [name for own in doubted for name in own]
            raise RuntimeError(
                f"in the last step one of two copies had a gradient and the other had none, of {shortened(names)}: "
                f"rank {this_rank()} left the parameters alone, but not their momentum; load a checkpoint"
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
