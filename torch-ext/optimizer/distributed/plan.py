"""The plan: everything about a group's step that depends on shapes alone, computed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from ..iteration import Iteration, choose_iteration, default_work_dtype
from ..schedules import Schedule


@dataclass(frozen=True)
class Batch:
    """Matrices rows x cols of one dtype and device that are orthogonalized in one call."""

    members: tuple[int, ...]  # positions in the group's list of parameters
    rows: int
    cols: int
    packed_dtype: torch.dtype
    iteration: Iteration
    turned: bool  # packed as cols x rows


def plan_batches(
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    schedule: Schedule,
    method: str,
    work_dtype: torch.dtype | None,
) -> tuple[Batch, ...]:
    """Return the batches of `parameters`, matrices with momentum `buffers`.

    `work_dtype` None leaves it to `default_work_dtype`. Raises ValueError where `method` is not safe in it.

    On a CPU every matrix is a batch of its own: there is no launch to save, and one small buffer at a time to hold.
    Tall ones are turned there while they are packed, since the iteration wants wide contiguous matrices.
    """
    batches = []
    keys = [(p.device, p.dtype, p.shape, buffer.dtype) for p, buffer in zip(parameters, buffers)]
    for members in positions_by(keys):
        first = parameters[members[0]]
        rows, cols = first.shape
        dtype = work_dtype or default_work_dtype(first)
        on_cpu = first.device.type == "cpu"
        packed_dtype = _packed_dtype(first.dtype, dtype)
        iteration = choose_iteration(first.device, dtype, *sorted(first.shape), schedule, method)
        for part in [(i,) for i in members] if on_cpu else [members]:
            batches.append(Batch(part, rows, cols, packed_dtype, iteration, turned=on_cpu and rows > cols))
    return tuple(batches)


def positions_by(keys: Iterable[Hashable]) -> list[tuple[int, ...]]:
    """Return the positions of equal keys, group by group, in the order of their first one."""
    positions: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        positions.setdefault(key, []).append(i)
    return [tuple(members) for members in positions.values()]


def _packed_dtype(dtype: torch.dtype, work_dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that holds what is not normalised yet: float16 has no room for 1e5, float32 none for 1e60."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32 if work_dtype == torch.float16 else work_dtype
