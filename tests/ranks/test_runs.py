"""Runs of indices and blocks of parts, against the indices and elements that they stand for."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

LENGTH = 12


@pytest.fixture(scope="module")
def runs(kernel):
    return kernel.plan.runs


@pytest.fixture(params=range(20))
def drawn(request) -> tuple[tuple[int, int], ...]:
    """Runs of indices below LENGTH, some of which begin where another ends."""
    draw = random.Random(request.param)
    cuts = sorted(draw.sample(range(LENGTH + 1), draw.randint(1, LENGTH)))
    return tuple(pair for pair in itertools.pairwise(cuts) if draw.random() < 0.7)


def indices(runs) -> list[int]:
    return [index for start, stop in runs for index in range(start, stop)]


def test_what_is_within_has_the_indices_there_counted_from_its_start(runs, drawn):
    for start, stop in itertools.combinations(range(LENGTH + 1), 2):
        cut = runs.within(drawn, start, stop)
        assert indices(cut) == [index - start for index in indices(drawn) if start <= index < stop]
        assert all(a < b for a, b in cut)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16])
def test_chunks_are_those_of_torch(runs, drawn, parts):
    """Which makes fewer where the last ones would be empty."""
    whole = torch.tensor(indices(drawn), dtype=torch.int64)
    expected = [part.tolist() for part in whole.chunk(parts)] + [[]] * parts
    for index in range(parts):
        chunk = runs.chunk(drawn, parts, index)
        assert indices(chunk) == expected[index] and all(a < b for a, b in chunk)


def test_joined_runs_are_the_fewest(runs, drawn):
    joined = runs.joined(drawn)
    assert indices(joined) == indices(drawn)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(joined))


@pytest.mark.parametrize("rows", [((0, 3),), ((0, 2), (5, 6))], ids=str)
@pytest.mark.parametrize("cols", [((2, 8),), ((1, 3), (4, 8))], ids=str)
def test_blocks_have_each_element_of_a_part_at_its_place(kernel, rows, cols):
    """Three parts are evenly spaced; of two other neighbours the second comes earlier in the buffer."""
    part, moved = kernel.plan.shards.Part(rows, cols), np.full((6, 6, 8), -1)
    offsets = {0: 20, 1: 40, 2: 60, 4: 90, 5: 0}
    blocks = kernel.plan.blocks.blocks_of((position, part, offset) for position, offset in offsets.items())
    for block in blocks:
        for i, r, c in itertools.product(range(block.count), range(block.rows), range(block.cols)):
            place = block.position + i, block.top + r, block.left + c
            assert moved[place] == -1
            moved[place] = block.offset + i * block.step + r * block.row_step + c
    for position, offset in offsets.items():
        elements = moved[position][np.ix_(indices(rows), indices(cols))]
        assert elements.flatten().tolist() == list(range(offset, offset + part.size))
    assert (moved >= 0).sum() == len(offsets) * part.size
    assert len(rows) * len(cols) > 1 or [block.count for block in blocks] == [3, 1, 1]
