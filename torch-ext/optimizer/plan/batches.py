"""Batches: the matrices of this process that are orthogonalized in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Hashable, Iterable, Optional, Sequence, TypeVar

import torch

from ..iteration import Iteration
from ..polar import even_pieces, matrices_together
from ..rules.equalization import Equalization
from .matrix import Matrix

Member = TypeVar("Member")

# What a batch may hold on a GPU: enough to fill it.
BATCH_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class Batch:
    """Matrices of one `batch_key`, and how they are packed: as cols x rows if `transposed`."""

    matrices: tuple[Matrix, ...]
    iteration: Iteration
    transposed: bool
    packed_shape: tuple[int, int]
    packed_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where its matrices are."""
        return self.matrices[0].parameter.device

    @property
    def first_group(self) -> int:
        """The number of its first matrix's group, with which the others agree in what is done to a whole batch."""
        return self.matrices[0].parameter.group

    @property
    def equalization(self) -> Equalization:
        """What is done to rows and columns of its matrices."""
        return self.matrices[0].parameter.equalization

    @property
    def moments_shape(self) -> Optional[tuple[int, int]]:
        """Rows and columns of each matrix's second moments, None where they have none."""
        return self.matrices[0].moments_shape

    @property
    def work_bytes(self) -> int:
        """What its orthogonalization holds at most: what is packed, the factors, and what `polar_factors` says.

        Where updates are balanced by second moments, a copy of the factors may take more than the last of these.
        """
        (m, n), iteration = sorted(self.packed_shape), self.iteration
        work, chain = iteration.work_dtype.itemsize, iteration.chain_dtype.itemsize
        single = not iteration.products.batched and not iteration.in_one_launch
        together = 1 if single else matrices_together(self.matrices[0].parameter.device, (m, n), iteration)
        squares = 2 if iteration.method == "standard" else 5
        one = max(2 * m * n * work + squares * m * m * chain, m * n * (work + 4))
        copies = 1 if self.equalization.before == "none" else 2
        balanced = 0 if self.moments_shape is None else len(self.matrices) * m * n * work
        return len(self.matrices) * m * n * (copies * self.packed_dtype.itemsize + work) + max(together * one, balanced)


def plan_batches(matrices: Iterable[Matrix], chunk_bytes: Optional[int] = None) -> tuple[Batch, ...]:
    """Return the batches of all `matrices`, those of one batch in their order.

    A batch packs at most `chunk_bytes`, or is one matrix; None is `BATCH_BYTES`, and on a CPU as many as are worked on
    together. Where products take one matrix at a time there is nothing to be saved by stacking. Tall matrices are
    transposed on a CPU while they are packed, since the iteration wants wide contiguous ones there.
    """
    batches = []
    for members in grouped(matrices, lambda matrix: matrix.batch_key):
        first = members[0]
        transposed = first.parameter.device.type == "cpu" and first.rows > first.cols
        shape = (first.cols, first.rows) if transposed else (first.rows, first.cols)
        for some in slices(members, _length(first, chunk_bytes)):
            batches.append(Batch(tuple(some), first.iteration, transposed, shape, first.parameter.packed_dtype))
    return tuple(batches)


def grouped(members: Iterable[Member], key: Callable[[Member], Hashable]) -> list[list[Member]]:
    """Return the members of equal keys, group by group, in the order of their first one."""
    groups: dict[Hashable, list[Member]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return list(groups.values())


def slices(members: Sequence, length: int) -> list[Sequence]:
    """Return `members` in as few slices of at most `length` as there can be, as even as they can be."""
    return [members[start:end] for start, end in even_pieces(len(members), length)]


def _length(matrix: Matrix, chunk_bytes: Optional[int]) -> int:
    """Return how many matrices like this a batch has at most."""
    if not matrix.iteration.products.batched:
        return 1
    device, rows, cols = matrix.parameter.device, matrix.rows, matrix.cols
    if device.type == "cpu" and chunk_bytes is None:
        return matrices_together(device, (min(rows, cols), max(rows, cols)), matrix.iteration)
    return max(1, (chunk_bytes or BATCH_BYTES) // (rows * cols * matrix.parameter.packed_dtype.itemsize))
