"""The plan: everything about a step that depends on shapes and settings alone, computed once and frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Hashable, Iterable, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ..iteration import Iteration, choose_iteration, default_work_dtype
from ..kernels.gemms import SINGLE
from ..learning_rate import Adjustment, step_multiplier
from ..polar import matrices_together
from ..schedules import Schedule

# What a batch may hold on a GPU: enough to fill it.
BATCH_BYTES = 256 * 2**20


class Matrix(NamedTuple):
    """One matrix: the position of its parameter in the list that was planned, and its own among the parameter's."""

    parameter: int
    index: int


class Settings(NamedTuple):
    """What the plan of a parameter depends on, besides the parameter; `kind` keeps apart what must not be stacked."""

    schedule: Schedule
    method: str
    work_dtype: Optional[torch.dtype]  # None: `default_work_dtype`
    adjust_lr_fn: Adjustment
    kind: Hashable


@dataclass(frozen=True)
class Batch:
    """Matrices rows x cols of one dtype, device and kind that are orthogonalized in one call."""

    members: tuple[Matrix, ...]
    rows: int
    cols: int
    multiplier: float
    packed_dtype: torch.dtype
    iteration: Iteration
    turned: bool  # packed as cols x rows

    def empty(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return memory for `count` of the members (B, m, n) as they are packed, and its view (B, rows, cols)."""
        shape = (self.cols, self.rows) if self.turned else (self.rows, self.cols)
        packed = torch.empty(count, *shape, dtype=self.packed_dtype, device=device)
        return packed, self.unturned(packed)

    def unturned(self, packed: Tensor) -> Tensor:
        """Return the view (B, rows, cols) of what is packed."""
        return packed.mT if self.turned else packed


class Planned(NamedTuple):
    """A parameter to plan for: name, local tensor and momentum buffer, places and sizes of its matrices, settings."""

    name: str
    parameter: Tensor
    buffer: Tensor
    matrices: Mapping[Matrix, tuple[int, int]]
    scale: float  # of the step multiplier
    settings: Settings

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of the products."""
        return self.settings.work_dtype or default_work_dtype(self.parameter)

    @property
    def packed_dtype(self) -> torch.dtype:
        """The dtype of what is not normalised yet."""
        return _packed_dtype(self.parameter.dtype, self.work_dtype)

    def iteration(self, size: tuple[int, int]) -> Iteration:
        """Return how matrices of `size`, rows and columns, are orthogonalized; ValueError where that is not safe."""
        sides = (min(size), max(size))
        return choose_iteration(
            self.parameter.device, self.work_dtype, sides, self.settings.schedule, self.settings.method
        )

    def multiplier(self, matrix: Matrix) -> float:
        """Return the step multiplier of one of the matrices."""
        return step_multiplier(self.settings.adjust_lr_fn, *self.matrices[matrix]) * self.scale

    def only(self, matrix: Matrix) -> Planned:
        """Return the plan for one of the matrices alone."""
        return self._replace(matrices={matrix: self.matrices[matrix]})

    @property
    def kind(self) -> Hashable:
        """What all matrices of a batch have in common, besides their size."""
        return self.parameter.device, self.parameter.dtype, self.buffer.dtype, self.scale, self.settings


def plan_batches(planned: Iterable[Planned], chunk_bytes: Optional[int] = None) -> tuple[Batch, ...]:
    """Return the batches of all matrices.

    A batch packs at most `chunk_bytes`, or is one matrix; None is `BATCH_BYTES`, and on a CPU as many as are worked on
    together. Where products take one matrix at a time there is nothing to be saved by stacking. Tall matrices are
    turned on a CPU while they are packed, since the iteration wants wide contiguous ones there.
    Raises ValueError where a method is not safe in the dtype.
    """
    every = [(own, matrix, size) for own in planned for matrix, size in own.matrices.items()]
    batches = []
    for positions in positions_by((own.kind, size) for own, _, size in every):
        own, matrix, (rows, cols) = every[positions[0]]
        device = own.parameter.device
        whole = Batch(
            members=tuple(every[i][1] for i in positions),
            rows=rows,
            cols=cols,
            multiplier=own.multiplier(matrix),
            packed_dtype=own.packed_dtype,
            iteration=own.iteration((rows, cols)),
            turned=device.type == "cpu" and rows > cols,
        )
        length = _length(whole, device, chunk_bytes)
        starts = range(0, len(whole.members), length)
        batches += [replace(whole, members=whole.members[start : start + length]) for start in starts]
    return tuple(batches)


def positions_by(keys: Iterable[Hashable]) -> list[tuple[int, ...]]:
    """Return the positions of equal keys, group by group, in the order of their first one."""
    positions: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        positions.setdefault(key, []).append(i)
    return [tuple(members) for members in positions.values()]


def _length(batch: Batch, device: torch.device, chunk_bytes: Optional[int]) -> int:
    """Return how many members a batch like this has at most."""
    if batch.iteration.gemms.name == SINGLE.name:
        return 1
    if device.type == "cpu" and chunk_bytes is None:
        return matrices_together(device, tuple(sorted((batch.rows, batch.cols))), batch.iteration)
    return max(1, (chunk_bytes or BATCH_BYTES) // (batch.rows * batch.cols * batch.packed_dtype.itemsize))


def _packed_dtype(dtype: torch.dtype, work_dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that holds what is not normalised yet: float16 has no room for 1e5, float32 none for 1e60."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32 if work_dtype == torch.float16 else work_dtype
