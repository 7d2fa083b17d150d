"""Random sharded parameters, their plans as each rank makes them, and an exchange carried out in one process."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import numpy as np

from tests.support import inside


class Model:
    """Matrices of random parameters that lie on `world` ranks, as records of a plan.

    `numbers` are arrays with a different number in each element of each matrix.
    """

    def __init__(self, kernel, world: int, seed: int, parameters: int = 12):
        self.world, self.ranks = world, tuple(range(world))
        self._kernel, self._draw = kernel, random.Random(seed)
        self.matrices = [matrix for number in range(parameters) for matrix in self._matrices(number)]
        self.numbers, first = {}, 1
        for matrix in self.matrices:
            rows, cols = matrix.rows, matrix.cols
            self.numbers[matrix] = np.arange(first, first + rows * cols).reshape(rows, cols)
            first += rows * cols
        # Chunks of one matrix, of some, or of all.
        self.limit = self._draw.choice([1, first // 4 + 1, 2 * first])

    def plan(self, rank: int):
        """Return the chunks as `rank` plans them, and all loads."""
        return inside.plan_messages(self._kernel, self.matrices, self.ranks, rank, self.limit)

    def part(self, matrix, rank: int) -> np.ndarray:
        """Return the numbers of the part that a rank holds of a matrix."""
        return cut(self.numbers[matrix], matrix.part(rank))

    def _matrices(self, number: int):
        draw = self._draw
        kind = draw.choice(["matrix", "matrix", "fused", "experts", "flatten", "batched"])
        rows, cols = draw.randint(1, 30), draw.randint(1, 30)
        shape = {"experts": (draw.randint(1, 6), rows, cols), "flatten": (rows, cols, 2), "batched": (rows, cols, 3)}
        shape = shape.get(kind, (rows, cols))
        view = inside.matrix_view(
            self._kernel,
            shape,
            stacked=kind == "experts",
            conv_mode="batched" if kind == "batched" else "flatten",
            split_rows=parts_of(rows, draw) if kind == "fused" else None,
        )
        dims = 3 if kind == "experts" else 2
        shards = inside.shards(self._kernel, view, layout_on(self._kernel, shape, dims, self.world, draw))
        costs = [inside.flops(self._kernel, *size) for size in view.shapes]
        return [inside.matrix(self._kernel, number, i, shards, cost) for i, cost in enumerate(costs)]


def layout_on(kernel, shape: Sequence[int], dims: int, world: int, draw: random.Random):
    """Return a random layout on all ranks, in which the first `dims` dimensions may be split."""
    sizes = factors(world, draw)
    splits = []
    for i in range(len(sizes)):
        dim = draw.choice([None, *range(dims)])
        # As FSDP2 does behind tensor parallelism: it cuts first as a later dimension of the mesh will.
        splits.append(None if dim is None else (dim, draw.choice([1, math.prod(sizes[i + 1 :])])))
    ranks = list(range(world))
    if draw.random() < 0.3:
        draw.shuffle(ranks)
    return inside.layout(kernel, shape, sizes, ranks, splits)


def factors(number: int, draw: random.Random) -> list[int]:
    """Return up to three factors of a number, of which some may be 1."""
    divisors = []
    for _ in range(draw.randint(0, 2)):
        divisors.append(draw.choice([d for d in range(1, number + 1) if number % d == 0]))
        number //= divisors[-1]
    return [*divisors, number]


def parts_of(rows: int, draw: random.Random) -> tuple[int, ...]:
    """Return up to three row counts that sum to `rows`."""
    marks = sorted({0, rows, *(draw.randint(0, rows) for _ in range(2))})
    return tuple(b - a for a, b in zip(marks, marks[1:]))


def cut(matrix: np.ndarray, part) -> np.ndarray:
    """Return the rows and columns of a part."""
    return matrix[np.ix_(indices(part.rows), indices(part.cols))]


def indices(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Return what is in the runs, one by one."""
    return [i for start, stop in runs for i in range(start, stop)]


def all_to_all(sides: Sequence, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return what each rank receives when each sends the front of its buffer as its side says."""
    starts = [np.cumsum([0, *side.sent]) for side in sides]
    return [
        np.concatenate([buffers[sender][starts[sender][to] : starts[sender][to + 1]] for sender in range(len(sides))])
        for to in range(len(sides))
    ]
