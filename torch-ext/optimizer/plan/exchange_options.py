"""What users choose about exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Optional

from torch.distributed import ProcessGroup

from ..parameters.setting_values import flag
from .process_groups import world_size

NAME_THE_RANKS = (
    "Name those that have copies by exchange=ExchangeOptions(process_group=...): under DistributedDataParallel its "
    "process group, and for parameters of this rank alone a group of this rank"
)


@dataclass(frozen=True)
class ExchangeOptions:
    """How ranks share the work on matrices.

    process_group: ranks that each hold a copy of every plain parameter, as under DDP, and so share the work.
    chunk_bytes: the most bytes of momentum, as the iteration takes it, that a rank holds for one chunk of exchanged
        matrices; a chunk has at least one matrix for every rank. None chooses the smallest chunks that still hide most
        of the exchange behind the work, by the model of `plan/costs.py`, and at most 256 MiB.
    chunks_in_flight: how many chunks are sent ahead while one is worked on. More than two bring no gain.
    ranks_per_matrix: how many neighbouring ranks, such as those of a node, may work on one matrix together if it would
        take one of them longer than the rest of a step. Updates are rounded differently. `explain()` says where.
    sum_gram: if a matrix is cut along its long side and it costs less, sum its Gram matrix over the ranks instead of
        sending the parts to an owner. Updates are rounded differently. `explain()` says where.

    Raises TypeError for a number that is not whole or a flag that is not a bool, and ValueError for a number below 1.
    `Muon` checks the process group.
    """

    process_group: Optional[ProcessGroup] = None
    chunk_bytes: Optional[int] = None
    chunks_in_flight: int = 2
    ranks_per_matrix: int = 1
    sum_gram: bool = False

    def __post_init__(self):
        for key in ("chunk_bytes", "chunks_in_flight", "ranks_per_matrix"):
            value = getattr(self, key)
            if value is None and key == "chunk_bytes":
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"{key} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
            object.__setattr__(self, key, int(value))  # ranks compare it in print, where NumPy's numbers differ
        flag("sum_gram", self.sum_gram)


def idle_exchange(exchange: Optional[ExchangeOptions]) -> list[str]:
    """Return a line if somebody has given options that change nothing, although there are other ranks."""
    if world_size() == 1 or exchange != ExchangeOptions():
        return []
    return [
        "exchange=ExchangeOptions() changes nothing. If you wrote process_group=torch.distributed.group.WORLD, it was "
        "None, as before init_process_group: make the options afterwards. Now every rank orthogonalizes all matrices "
        "that are not DTensors"
    ]
