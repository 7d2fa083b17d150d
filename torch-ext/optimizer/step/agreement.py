"""Whether ranks that share parameters take a step alike: with the same settings, and gradients of the same copies."""

from __future__ import annotations

import zlib
from typing import Mapping, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.settings import Group
from ..plan.agreement import Terms
from ..plan.process_groups import Ranks, all_reduce_max_, shortened, this_rank
from ..rules.scaling import GradientScaling


class StepAgreement:
    """What the ranks that share some parameters tell each other in one step.

    They compare a checksum of their settings. Where it differs the step changes nothing, as where gradients overflow.
    The result is read back when the next step begins, so that this one never waits for the device.
    """

    def __init__(self, terms: Terms, groups: Sequence[Group]):
        self._names = shortened(terms.names)
        self._settings = terms.settings(groups)
        self._device = terms.device
        self._disputes: list[tuple[Optional[str], Tensor]] = []  # None: settings, else names of parameters
        self._on_host: Optional[Tensor] = None
        self._copied: Optional[torch.Event] = None

    def overflow(self, ranks: Ranks, found_inf: Optional[Tensor]) -> Tensor:
        """Return, float32 (1), 1 if gradients overflow on any of `ranks` or their settings differ, 0 if not.

        `found_inf` is what GradScaler says on this rank. All ranks must call it.
        """
        code = float(zlib.crc32(self._settings.encode()) % 2**24)  # which float32 holds
        # The largest code and the largest negated one are those of all ranks only if all have the same.
        values = torch.tensor([code, -code, 0.0], dtype=torch.float32).to(self._device, non_blocking=True)
        if found_inf is not None:
            values[2:].copy_(found_inf.reshape(1))
        all_reduce_max_(values, ranks, "settings", self._names)
        differ = values[:1] != -values[1:2]
        self._disputes.append((None, differ))
        return torch.maximum(values[2:], differ.float())

    def note_absent_copies(self, names: str, verdicts: Tensor) -> None:
        """Note the owners' verdicts on matrices of the parameters `names`: below zero where copies are at odds."""
        self._disputes.append((names, (verdicts < 0).any().reshape(1)))

    def close(self) -> None:
        """Start copying the results to the host."""
        disputed = torch.cat([disputed for _, disputed in self._disputes])
        self._on_host = disputed.to("cpu", non_blocking=True)
        if disputed.device.type != "cpu":
            self._copied = torch.Event(disputed.device)
            self._copied.record()

    def check(self) -> None:
        """Raise RuntimeError if ranks were not at one in the step that is closed."""
        if self._on_host is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        disputed = [names for (names, _), yes in zip(self._disputes, self._on_host.tolist()) if yes]
        if None in disputed:
            raise RuntimeError(
                f"in the last step ranks had different settings for {self._names}, and nothing that they "
                f"share was changed: rank {this_rank()} had {self._settings}"
            )
        if disputed:
            raise RuntimeError(
                f"in the last step one of two copies had a gradient and the other had none, of {', '.join(disputed)}: "
                f"rank {this_rank()} left the parameters alone, but not their momentum; load a checkpoint"
            )


def agreed_scalings(
    terms: Mapping[Ranks, Terms], groups: Sequence[Group], scaling: GradientScaling
) -> tuple[dict[Optional[Ranks], GradientScaling], dict[Ranks, StepAgreement]]:
    """Return `scaling` as the ranks that share parameters agree about it, and how they did; all must call it.

    Gradients overflow for all of them or for none. The scaling of None is for this process alone.
    """
    scalings: dict[Optional[Ranks], GradientScaling] = {None: scaling}
    agreements = {}
    for ranks, shared in sorted(terms.items()):
        agreements[ranks] = StepAgreement(shared, groups)
        scalings[ranks] = scaling._replace(found_inf=agreements[ranks].overflow(ranks, scaling.found_inf))
    return scalings, agreements
