"""Second moments of a process's matrices in a step: of a batch of its own, and on the way to owners and back.

They are a state, and live with the holders of a matrix. An owner gets them with the direction, and sends new ones back
with the update.
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..parameters.state import MOMENTS
from ..plan.messages import HeldPart
from .local_matrix import LocalMatrix, others_of


def stacked_moments(parts: Sequence[LocalMatrix]) -> Tensor:
    """Return a copy of the second moments of whole matrices, (B, rows, 1) or (B, 1, cols)."""
    return torch.stack(others_of(parts, MOMENTS))


def keep_moments_(parts: Sequence[LocalMatrix], moments: Tensor, found_inf: Optional[Tensor]) -> None:
    """Put new `moments` in the place of those of whole matrices, unless `found_inf` is above 0."""
    if found_inf is not None:
        moments = moments.where(found_inf == 0, stacked_moments(parts))
    torch._foreach_copy_(others_of(parts, MOMENTS), list(moments))


class MovedMoments(NamedTuple):
    """Where the second moments of a holder's parts are in the messages of a chunk; offsets are int64."""

    dtype: torch.dtype
    senders: Sequence[int]  # the parts whose moments are sent
    offsets_out: Tensor  # of each of their moments, in what is gathered
    takers: Sequence[int]  # the parts that have moments
    offsets_in: Tensor  # of each of their moments, in what comes back
    takers_of: Tensor  # the part that each of these moments is of

    def send_(self, outgoing: Tensor, parts: Sequence[LocalMatrix]) -> None:
        """Write the moments into `outgoing`."""
        if self.senders:
            moments = torch.cat([parts[i].get(MOMENTS).reshape(-1) for i in self.senders])
            outgoing.view(self.dtype).index_copy_(0, self.offsets_out, moments)

    def take_(
        self, incoming: Tensor, parts: Sequence[LocalMatrix], active: Tensor, found_inf: Optional[Tensor]
    ) -> None:
        """Put the moments of `incoming` in the place of those of parts that are `active`, unless gradients overflow."""
        moments = [parts[i].get(MOMENTS) for i in self.takers]
        before = torch.cat([each.reshape(-1) for each in moments])
        taken = active.index_select(0, self.takers_of)
        taken = taken if found_inf is None else taken & (found_inf == 0)
        after = incoming.view(self.dtype).index_select(0, self.offsets_in).where(taken, before)
        pieces = after.split([each.numel() for each in moments])
        torch._foreach_copy_(moments, [piece.view(each.shape) for piece, each in zip(pieces, moments)])


def moved_moments(parts: Sequence[HeldPart], dtype: torch.dtype, device: torch.device) -> Optional[MovedMoments]:
    """Return the indices of the second moments of a holder's parts; None if they have none."""
    takers = [i for i, part in enumerate(parts) if part.size.moments]
    if not takers:
        return None
    counts = [parts[i].size.moments for i in takers]
    senders = [i for i in takers if parts[i].gathered is not None]

    def indices(runs: Iterable[tuple[int, int]]) -> Tensor:
        """Return the offsets of all second moments, of which each run has some from its first offset on."""
        ranges = [torch.arange(first, first + count, device=device) for first, count in runs]
        return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.int64, device=device)

    return MovedMoments(
        dtype=dtype,
        senders=senders,
        offsets_out=indices((parts[i].gathered.moments, parts[i].size.moments) for i in senders),
        takers=takers,
        offsets_in=indices((parts[i].scattered.moments, parts[i].size.moments) for i in takers),
        # With a size that the host knows, neither a GPU is waited for nor parameters on meta are refused.
        takers_of=torch.tensor(takers, device=device).repeat_interleave(
            torch.tensor(counts, device=device), output_size=sum(counts)
        ),
    )
