"""The plan: everything about a group's step that depends on shapes alone, computed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from ..polar import default_work_dtype


@dataclass(frozen=True)
class Batch:
    """Matrices rows x cols of one dtype and device that are orthogonalized in one call."""

    members: tuple[int, ...]  # positions in the group's list of parameters
    rows: int
    cols: int
    work_dtype: torch.dtype
    turned: bool  # packed as cols x rows

    @property
    def packed_dtype(self) -> torch.dtype:
        """float16 works only on normalised matrices: a gradient of 1e5 does not fit into it."""
        return torch.float32 if self.work_dtype == torch.float16 else self.work_dtype


def plan_batches(parameters: Sequence[Tensor], work_dtype: torch.dtype | None) -> tuple[Batch, ...]:
    """Return the batches of `parameters`, matrices; `work_dtype` None leaves it to `default_work_dtype`.

    On a CPU every matrix is a batch of its own: there is no launch to save, and its packed direction stays in the
    cache from the first pass to the last. There tall matrices are turned while they are packed, since products are
    faster, and give the same bits in every batch, over wide contiguous ones.
    """
    batches = []
    for members in positions_by(parameters, _batch_key):
        first = parameters[members[0]]
        rows, cols = first.shape
        dtype = work_dtype or default_work_dtype(first)
        on_cpu = first.device.type == "cpu"
        for part in [(i,) for i in members] if on_cpu else [members]:
            batches.append(Batch(part, rows, cols, dtype, turned=on_cpu and rows > cols))
    return tuple(batches)


def positions_by(parameters: Iterable[Tensor], key) -> list[tuple[int, ...]]:
    """Return the positions of the parameters that share a key, group by group, in the order of their first one."""
    positions: dict[Hashable, list[int]] = {}
    for i, p in enumerate(parameters):
        positions.setdefault(key(p), []).append(i)
    return [tuple(members) for members in positions.values()]


def device_and_dtype(p: Tensor) -> tuple:
    """The key of what one multi-tensor kernel can take together."""
    return p.device, p.dtype


def _batch_key(p: Tensor) -> tuple:
    return p.device, p.dtype, p.shape
