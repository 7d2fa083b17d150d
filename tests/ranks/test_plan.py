"""Plans of exchanges at 1 to 4,096 ranks: nothing is lost or doubled, all ranks agree, and the work is balanced."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.random_plans import Model, all_to_all, cut, indices
from tests.support.sharded_models import Layout

SMALL = [(world, seed) for world in (1, 2, 3, 4, 6, 8, 16) for seed in range(4)]
LARGE = [(64, 0), (512, 1), (1000, 2), (4096, 3)]


def whole_plan(kernel, world, seed):
    """Return a model, and each chunk as all ranks have it."""
    model = Model(kernel, world, seed)
    plans = [model.plan(rank) for rank in model.ranks]
    assert len({loads for _, loads in plans}) == 1
    return model, list(zip(*(chunks for chunks, _ in plans), strict=True))


@pytest.mark.parametrize("world, seed", SMALL)
def test_all_ranks_agree_on_the_one_owner_of_each_matrix(kernel, world, seed):
    model, chunks = whole_plan(kernel, world, seed)
    owned = [matrix for chunk in chunks for side in chunk for matrix in side.owned]
    assert sorted(owned) == sorted(unit.matrix for unit in model.units)
    for chunk in chunks:
        owners = {matrix: rank for rank, side in enumerate(chunk) for matrix in side.owned}
        assert all(dict(side.owners) == owners for side in chunk)


@pytest.mark.parametrize("world, seed", SMALL)
def test_owner_gets_each_element_of_its_matrices_once(kernel, world, seed):
    model, chunks = whole_plan(kernel, world, seed)
    for chunk in chunks:
        buffers = []
        for rank, side in enumerate(chunk):
            buffer = np.zeros(sum(side.gather.sent) + side.scratch, dtype=np.int64)
            for matrix, place in zip(side.held, side.gathered, strict=True):
                own = model.part(matrix, rank).ravel()
                assert not buffer[place : place + own.size].any()  # nothing lies over another
                buffer[place : place + own.size] = own
            buffers.append(buffer)
        for side, received in zip(chunk, all_to_all([side.gather for side in chunk], buffers)):
            assert received.size == sum(side.gather.received)
            found = [np.zeros_like(model.numbers[matrix]) for matrix in side.owned]
            for block in side.blocks_in:
                piece = received[block.offset : block.offset + block.part.size]
                rows, cols = indices(block.part.rows), indices(block.part.cols)
                found[block.matrix][np.ix_(rows, cols)] += piece.reshape(len(rows), len(cols))
            for matrix, numbers in zip(side.owned, found):
                np.testing.assert_array_equal(numbers, model.numbers[matrix])


@pytest.mark.parametrize("world, seed", SMALL)
def test_holders_get_back_their_own_parts(kernel, world, seed):
    model, chunks = whole_plan(kernel, world, seed)
    for chunk in chunks:
        buffers = []
        for side in chunk:
            buffer = np.zeros(sum(side.scatter.sent), dtype=np.int64)
            for block in side.blocks_out:
                own = cut(model.numbers[side.owned[block.matrix]], block.part).ravel()
                assert not buffer[block.offset : block.offset + own.size].any()
                buffer[block.offset : block.offset + own.size] = own
            buffers.append(buffer)
        received = all_to_all([side.scatter for side in chunk], buffers)
        for rank, side in enumerate(chunk):
            held = {unit.matrix for unit in model.units if unit.shards.part(unit.matrix.index, rank).size}
            assert set(side.held) <= held
            for matrix, place in zip(side.held, side.scattered, strict=True):
                own = model.part(matrix, rank).ravel()
                np.testing.assert_array_equal(received[rank][place : place + own.size], own)
    everything = [set().union(*(chunk[rank].held for chunk in chunks)) for rank in model.ranks]
    for rank, found in enumerate(everything):
        assert found == {unit.matrix for unit in model.units if unit.shards.part(unit.matrix.index, rank).size}


@pytest.mark.parametrize("world, seed", SMALL)
def test_flags_reach_the_owner_and_its_answer_all_holders(kernel, world, seed):
    model, chunks = whole_plan(kernel, world, seed)
    for chunk in chunks:
        outgoing = [np.zeros(sum(side.gather.sent) + side.scratch, dtype=np.int64) for side in chunk]
        for rank, (side, buffer) in enumerate(zip(chunk, outgoing)):
            buffer[list(side.presence)] = 1 + rank
        answers = []
        for side, received in zip(chunk, all_to_all([side.gather for side in chunk], outgoing)):
            heard = [
                sorted(received[place] for which, place, _ in side.presence_in if which == k)
                for k in range(len(side.owned))
            ]
            for matrix, who in zip(side.owned, heard):
                holders = [1 + rank for rank, other in enumerate(chunk) if matrix in other.held]
                assert who == holders
            answer = np.zeros(sum(side.scatter.sent), dtype=np.int64)
            for which, place in side.verdicts_out:
                answer[place] = model.numbers[side.owned[which]][0, 0]
            answers.append(answer)
        for side, received in zip(chunk, all_to_all([side.scatter for side in chunk], answers)):
            for matrix, place in zip(side.held, side.verdicts, strict=True):
                assert received[place] == model.numbers[matrix][0, 0]


@pytest.mark.parametrize("world, seed", LARGE)
def test_many_ranks_send_what_the_others_expect(kernel, world, seed):
    model = Model(kernel, world, seed, parameters=40)
    draw = random.Random(seed)
    sample = sorted(draw.sample(range(world), 24))
    plans = {rank: model.plan(rank)[0] for rank in sample}
    for a, b in itertools.product(sample, sample):
        for one, other in zip(plans[a], plans[b], strict=True):
            assert one.gather.sent[b] == other.gather.received[a]
            assert one.scatter.sent[b] == other.scatter.received[a]
            assert one.owners == other.owners


@pytest.mark.parametrize("world, seed", LARGE)
def test_blocks_of_an_owner_among_many_ranks_cover_its_matrices(kernel, world, seed):
    """Each element once."""
    model = Model(kernel, world, seed, parameters=40)
    (_, owner), *_ = model.plan(0)[0][0].owners
    for side in model.plan(owner)[0]:
        counts = [np.zeros_like(model.numbers[matrix]) for matrix in side.owned]
        for block in side.blocks_in:
            counts[block.matrix][np.ix_(indices(block.part.rows), indices(block.part.cols))] += 1
        assert all((count == 1).all() for count in counts)


EVEN = [
    Layout((8,), ("0",)),
    Layout((8,), ("1",)),
    Layout((2, 4), ("r", "0")),
    Layout((4, 2), ("1", "r")),
    Layout((2, 2, 2), ("r", "0/2", "0")),
    Layout((2, 2, 2), ("0", "r", "1")),
    Layout((8,), ("r",)),
    Layout((4, 16), ("r", "0")),
]


def even_plan(kernel, layout: Layout, count: int):
    """Return a model of `count` matrices 64 x 128, and each of its chunks as all ranks have it."""
    model = Model(kernel, math.prod(layout.mesh), seed=0, parameters=0)
    own = kernel.distributed
    splits = [None if s == "r" else (int(s[0]), int(s[2:] or 1)) for s in layout.splits]
    on = own.placement.Layout((64, 128), own.placement.mesh_of(layout.mesh, model.ranks), tuple(splits))
    view = kernel.matrices.matrix_view("w", torch.empty(64, 128, device="meta"))
    model.units = [own.messages.Unit(own.plan.Matrix(i, 0), own.shards.Shards(view, on), 1) for i in range(count)]
    return model, [list(chunk) for chunk in zip(*(model.plan(rank)[0] for rank in model.ranks), strict=True)]


@pytest.mark.parametrize("layout", EVEN, ids=str)
def test_bytes_follow_the_formula_without_padding(kernel, layout):
    """(S/R)(1 + 1/D - 2/(RD)) elements of S on R parts in D copies, and a flag for each part and each way it goes."""
    copies = math.prod(size for size, split in zip(layout.mesh, layout.splits) if split == "r")
    ranks, parts = math.prod(layout.mesh), math.prod(layout.mesh) // copies
    count = 3 * ranks
    model, chunks = even_plan(kernel, layout, count)
    sent = [
        sum(sum(side.sent) - side.sent[rank] for chunk in chunks for side in (chunk[rank].gather, chunk[rank].scatter))
        for rank in model.ranks
    ]
    # To the owner of each matrix that is another's, and from this one's to all others.
    flags = (count - 3) + 3 * (ranks - 1)
    formula = count * 64 * 128 / parts * (1 + 1 / copies - 2 / (parts * copies))
    # A copy gathers to those owners that it has, whose number is even only over all copies.
    assert sum(sent) - ranks * flags == pytest.approx(ranks * formula, rel=1e-12)
    if copies == 1:
        assert sent == [pytest.approx(formula + flags, rel=1e-12)] * ranks


@pytest.mark.parametrize("count", [1, 5, 8, 9, 16, 40])
def test_as_many_copies_work_together_as_are_useful(kernel, count):
    """As many as can work in the time of the largest matrix.

    8 copies of 4 parts: of equal matrices, so many as have an owner for each.
    """
    model, _ = even_plan(kernel, Layout((8, 4), ("r", "0")), count)
    expected = next(copies for copies in (1, 2, 4, 8) if 4 * copies >= min(count, 32))
    groups = {}
    for rank in model.ranks:
        ((ranks, units),) = kernel.distributed.exchange_plan.among_useful_copies(model.units, rank).items()
        assert rank in ranks
        assert [unit.matrix for unit in units] == [unit.matrix for unit in model.units]
        groups[rank] = ranks
        for unit, whole in zip(units, model.units):  # everybody has what it had
            assert unit.shards.part(0, rank) == whole.shards.part(0, rank)
            assert unit.shards.layout.copies == expected
    assert sorted(itertools.chain(*set(groups.values()))) == list(model.ranks)
    assert all(groups[other] == ranks for ranks in groups.values() for other in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 16])
def test_huge_plan_takes_two_seconds_and_200_mb(kernel, repository, copies):
    """A plan of ten thousand parameters on 4,096 ranks."""
    variants = Path(kernel.__file__).parents[1]
    command = [sys.executable, "-m", "tests.support.large_plan", str(variants), str(copies)]
    done = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds <= 2.0
    assert megabytes <= 200.0
