"""Batches: the matrices of this process that are packed together, and chains of batches that share products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Hashable, Iterable, Optional, Sequence

import torch

from ..iteration import Iteration
from ..kernels.normalization import has_native_passes
from ..parameters.sequences import grouped
from ..polar.chains import chain_key
from ..polar.factors import iteration_bytes
from ..polar.packing import BATCH_BYTES, even_pieces, matrices_together, packed_together
from ..rules.equalization import Equalization
from .matrix import Matrix


@dataclass(frozen=True, eq=False)
class Batch:
    """Matrices with one `batch_key`, and how they are packed: transposed, as cols x rows, if `transposed`."""

    matrices: tuple[Matrix, ...]
    iteration: Iteration
    transposed: bool
    packed_shape: tuple[int, int]
    packed_dtype: torch.dtype

    @cached_property
    def first(self) -> Matrix:
        """Its first matrix. Its other matrices, and their groups, agree with it in all that applies to a batch."""
        return self.matrices[0]

    @cached_property
    def device(self) -> torch.device:
        """The device of its matrices."""
        return self.first.parameter.device

    @cached_property
    def equalization(self) -> Equalization:
        """What is done to the rows and columns of its matrices."""
        return self.first.parameter.equalization

    @cached_property
    def moments_shape(self) -> Optional[tuple[int, int]]:
        """Rows and columns of each matrix's second moments; None if there are none."""
        return self.first.moments_shape

    @property
    def shared_products_key(self) -> Hashable:
        """What batches that share m x m products (`chains`) have in common; the batch if it shares none."""
        goes_once = self.equalization.rounds(*self.packed_shape) == 1
        chain = chain_key(self.device, self.iteration)
        if chain is None or self.first.parameter.offloaded or not goes_once:
            return self
        return self.device, min(self.packed_shape), chain

    @property
    def packed_bytes(self) -> int:
        """The bytes of its packed directions."""
        return len(self.matrices) * math.prod(self.packed_shape) * self.packed_dtype.itemsize

    def memory(self, count: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return sizes and dtypes of the memory that `count` of its matrices need: directions, and factors.

        Some iterations also need squares (`Iteration.squares`): each (b, m, m) for the b matrices that are worked on
        together.
        """
        size, m, (squares, dtype) = (count, *self.packed_shape), min(self.packed_shape), self.iteration.squares
        room = [((min(count, self._together), m, m), dtype)] * squares
        return [(size, self.packed_dtype), (size, self.iteration.work_dtype), *room]

    @property
    def memory_bytes(self) -> int:
        """The bytes of `memory` for all of its matrices."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.memory(len(self.matrices)))

    @property
    def work_bytes(self) -> int:
        """The most bytes that it takes beside `memory`: equalized directions, and what the iteration works in.

        If rows or columns are divided and no native pass does that in place, a copy of the matrices is counted instead
        of that work if it is larger.
        """
        (m, n), count, work = sorted(self.packed_shape), len(self.matrices), self.iteration.work_dtype.itemsize
        equalized = 0 if self.equalization.before == "none" else count * m * n * self.packed_dtype.itemsize
        in_place = has_native_passes(self.device, self.iteration.work_dtype)
        divides = self.equalization != Equalization() or self.moments_shape is not None
        divided = count * m * n * work if divides and not in_place else 0
        counts = count, self._together
        worked_in = iteration_bytes(self.iteration, self.device, (m, n), counts, self.packed_dtype)
        return equalized + max(worked_in, divided)

    @property
    def _together(self) -> int:
        """How many of its matrices are worked on together at most."""
        m, n = sorted(self.packed_shape)
        return min(len(self.matrices), matrices_together(self.device, (m, n), self.iteration))


# Batches that are packed at one time and share their m x m products; or one batch.
Chain = tuple[Batch, ...]


def bytes_of_chain(chain: Iterable[Batch]) -> int:
    """Return the most bytes that a step takes at a time for a chain, beside parameters, gradients and state."""
    return sum(batch.memory_bytes + batch.work_bytes for batch in chain)


def plan_batches(matrices: Iterable[Matrix], chunk_bytes: Optional[int] = None) -> tuple[Batch, ...]:
    """Return the batches of all `matrices`; inside a batch they keep their order.

    A batch packs at most `chunk_bytes`, or is one matrix. None stands for `BATCH_BYTES` on a GPU, and on a CPU for as
    many matrices as are worked on together. If products take one matrix at a time, so does a batch: stacking would save
    nothing. On a CPU tall matrices are transposed while they are packed, because the iteration needs wide contiguous
    matrices there.
    """
    batches = []
    for members in grouped(matrices, lambda matrix: matrix.batch_key):
        first = members[0]
        transposed = first.parameter.device.type == "cpu" and first.rows > first.cols
        shape = (first.cols, first.rows) if transposed else (first.rows, first.cols)
        for together in slices(members, _length(first, chunk_bytes)):
            batches.append(Batch(tuple(together), first.iteration, transposed, shape, first.parameter.packed_dtype))
    return tuple(batches)


def chains(batches: Iterable[Batch], most_bytes: Optional[int] = None) -> tuple[Chain, ...]:
    """Return batches in chains, which are packed at one time and share their m x m products.

    A chain packs at most `most_bytes` (None: BATCH_BYTES), or is one batch. On a GPU, batches of the Gram iteration
    share a chain if their matrices have one short side: 12 matrices of 768 x 2304 and 24 of 768 x 3072 multiply as 36
    of 768 x 768 in between. Offloaded momentum comes to the device batch by batch, so those are chains of one.
    """
    result: list[list[Batch]] = []
    for sharing in grouped(batches, lambda batch: batch.shared_products_key):
        room = 0
        for batch in sharing:
            if batch.packed_bytes > room:
                result.append([])
                room = most_bytes or BATCH_BYTES
            result[-1].append(batch)
            room -= batch.packed_bytes
    return tuple(map(tuple, result))


def slices(members: Sequence, length: int) -> list[Sequence]:
    """Return `members` in the fewest possible slices of at most `length`, as even as possible."""
    return [members[start:end] for start, end in even_pieces(len(members), length)]


def _length(matrix: Matrix, chunk_bytes: Optional[int]) -> int:
    """Return how many matrices like this one a batch may have."""
    if not matrix.iteration.products.batched:
        return 1
    device, itemsize = matrix.parameter.device, matrix.parameter.packed_dtype.itemsize
    if device.type == "cpu" and chunk_bytes is None:
        return matrices_together(device, matrix.size, matrix.iteration)
    return packed_together(matrix.size, itemsize, chunk_bytes or BATCH_BYTES)
