"""Plans of exchanges at 1 to 4,096 ranks: nothing is lost or doubled, all ranks agree, and the work is balanced."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import inside
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
    owned = [matrix for chunk in chunks for side in chunk for matrix in side.owner.matrices]
    assert sorted(matrix.key for matrix in owned) == sorted(matrix.key for matrix in model.matrices)
    for chunk in chunks:
        owners = {matrix: rank for rank, side in enumerate(chunk) for matrix in side.owner.matrices}
        assert all({each.matrix: each.owner for each in side.assignments} == owners for side in chunk)


@pytest.mark.parametrize("world, seed", SMALL)
def test_owner_gets_each_element_of_its_matrices_once(kernel, world, seed):
    model, chunks = whole_plan(kernel, world, seed)
    for chunk in chunks:
        buffers = []
        for rank, side in enumerate(chunk):
            buffer = np.zeros(sum(side.holder.sent) + side.holder.scratch, dtype=np.int64)
            for held in side.holder.parts:
                elements, offset = model.part(held.matrix, rank).ravel(), held.direction
                assert not buffer[offset : offset + elements.size].any()  # nothing lies over another
                assert offset % 4 == 0  # of 16 bytes, as all that is moved at once
                buffer[offset : offset + elements.size] = elements
            buffers.append(buffer)
        for side, received in zip(chunk, all_to_all([inside.lengths(side, "gather") for side in chunk], buffers)):
            assert received.size == sum(side.owner.received)
            matrices = [np.zeros_like(model.numbers[matrix]) for matrix in side.owner.matrices]
            for position, part, offset in inside.gathered_parts(side.owner):
                rows, cols = indices(part.rows), indices(part.cols)
                piece = received[offset : offset + part.size].reshape(len(rows), len(cols))
                matrices[position][np.ix_(rows, cols)] += piece
            for matrix, numbers in zip(side.owner.matrices, matrices):
                np.testing.assert_array_equal(numbers, model.numbers[matrix])


@pytest.mark.parametrize("world, seed", SMALL)
def test_holders_get_back_their_own_parts(kernel, world, seed):
    model, chunks = whole_plan(kernel, world, seed)
    for chunk in chunks:
        buffers = []
        for side in chunk:
            buffer = np.zeros(sum(side.owner.sent), dtype=np.int64)
            for position, part, offset in inside.scattered_parts(side.owner):
                piece = cut(model.numbers[side.owner.matrices[position]], part).ravel()
                assert not buffer[offset : offset + piece.size].any()
                buffer[offset : offset + piece.size] = piece
            buffers.append(buffer)
        received = all_to_all([inside.lengths(side, "scatter") for side in chunk], buffers)
        for rank, side in enumerate(chunk):
            held = {matrix for matrix in model.matrices if matrix.part(rank).size}
            assert {part.matrix for part in side.holder.parts} <= held
            for part in side.holder.parts:
                elements, offset = model.part(part.matrix, rank).ravel(), part.scattered.elements
                np.testing.assert_array_equal(received[rank][offset : offset + elements.size], elements)
    everything = [{part.matrix for chunk in chunks for part in chunk[rank].holder.parts} for rank in model.ranks]
    for rank, matrices in enumerate(everything):
        assert matrices == {matrix for matrix in model.matrices if matrix.part(rank).size}


@pytest.mark.parametrize("world, seed", SMALL)
def test_flags_reach_the_owner_and_its_answer_all_holders(kernel, world, seed):
    model, chunks = whole_plan(kernel, world, seed)
    for chunk in chunks:
        outgoing = [np.zeros(sum(side.holder.sent) + side.holder.scratch, dtype=np.int64) for side in chunk]
        for rank, (side, buffer) in enumerate(zip(chunk, outgoing)):
            buffer[[part.gathered.flag for part in side.holder.parts if part.gathered is not None]] = 1 + rank
        answers = []
        for side, received in zip(chunk, all_to_all([inside.lengths(side, "gather") for side in chunk], outgoing)):
            heard = [
                sorted(
                    received[p.gathered.flag] for p in side.owner.parts if p.gathered is not None and p.position == k
                )
                for k in range(len(side.owner.matrices))
            ]
            for matrix, flags in zip(side.owner.matrices, heard):
                senders = [
                    1 + rank
                    for rank, other in enumerate(chunk)
                    if matrix in [part.matrix for part in other.holder.parts if part.gathered is not None]
                ]
                assert flags == senders and len(set(flags)) == len(flags)
                # One for each part that is not empty, whatever the copies.
                parts = {matrix.part(rank) for rank in model.ranks if matrix.part(rank).size}
                assert len(flags) == len(parts)
            answer = np.zeros(sum(side.owner.sent), dtype=np.int64)
            for part in side.owner.parts:
                answer[part.scattered.flag] = model.numbers[side.owner.matrices[part.position]][0, 0]
            answers.append(answer)
        for side, received in zip(chunk, all_to_all([inside.lengths(side, "scatter") for side in chunk], answers)):
            for part in side.holder.parts:
                assert received[part.scattered.flag] == model.numbers[part.matrix][0, 0]


@pytest.mark.parametrize("world, seed", LARGE)
def test_many_ranks_send_what_the_others_expect(kernel, world, seed):
    model = Model(kernel, world, seed, parameters=40)
    draw = random.Random(seed)
    sample = sorted(draw.sample(range(world), 24))
    plans = {rank: model.plan(rank)[0] for rank in sample}
    for a, b in itertools.product(sample, sample):
        for one, other in zip(plans[a], plans[b], strict=True):
            assert one.holder.sent[b] == other.owner.received[a]
            assert one.owner.sent[b] == other.holder.received[a]
            assert one.assignments == other.assignments


@pytest.mark.parametrize("world, seed", LARGE)
def test_blocks_of_an_owner_among_many_ranks_cover_its_matrices(kernel, world, seed):
    """Each element once."""
    model = Model(kernel, world, seed, parameters=40)
    owner = model.plan(0)[0][0].assignments[0].owner
    for side in model.plan(owner)[0]:
        counts = [np.zeros_like(model.numbers[matrix]) for matrix in side.owner.matrices]
        for position, part, _ in inside.gathered_parts(side.owner):
            counts[position][np.ix_(indices(part.rows), indices(part.cols))] += 1
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
    splits = [None if s == "r" else (int(s[0]), int(s[2:] or 1)) for s in layout.splits]
    on_ranks = inside.layout(kernel, (64, 128), layout.mesh, model.ranks, splits)
    shards = inside.shards(kernel, inside.matrix_view(kernel, (64, 128)), on_ranks)
    model.matrices = [inside.matrix(kernel, i, 0, shards) for i in range(count)]
    return model, [list(chunk) for chunk in zip(*(model.plan(rank)[0] for rank in model.ranks), strict=True)]


@pytest.mark.parametrize("layout", EVEN, ids=str)
def test_bytes_follow_the_formula_up_to_padding(kernel, layout):
    """(S/R)(1 + 1/D - 2/(RD)) elements of S on R parts in D copies; a flag for each part that is sent; padding.

    Parts of these matrices are multiples of 16 bytes, so that only the flags of a message are padded, by less than 16.
    """
    copies = math.prod(size for size, split in zip(layout.mesh, layout.splits) if split == "r")
    ranks, parts = math.prod(layout.mesh), math.prod(layout.mesh) // copies
    count = 3 * ranks
    model, chunks = even_plan(kernel, layout, count)
    sent = [
        sum(sum(s) - s[rank] for chunk in chunks for s in (chunk[rank].holder.sent, chunk[rank].owner.sent))
        for rank in model.ranks
    ]
    # From the other parts of its copy to the owner of each matrix, and from there to all others, of all ranks.
    flags = count * (parts - 1 + ranks - 1)
    messages = 2 * len(chunks) * ranks * (ranks - 1)
    formula = count * 64 * 128 / parts * (1 + 1 / copies - 2 / (parts * copies))
    # A copy gathers to those owners that it has, whose number is even only over all copies.
    padding = sum(sent) - ranks * formula - flags
    assert 0 <= padding <= 3 * messages  # of four bytes each
    if copies == 1:
        assert max(sent) - min(sent) <= 2 * 3 * len(chunks) * (ranks - 1)


@pytest.mark.parametrize("count", [1, 5, 8, 9, 16, 40])
def test_as_many_copies_work_together_as_are_useful(kernel, count):
    """8 copies of 4 parts, of equal matrices: the least of work or one matrix, and of sending it to all copies."""
    model, _ = even_plan(kernel, Layout((8, 4), ("r", "0")), count)
    sending = kernel.plan.costs.FLOPS_OF_AN_ELEMENT * 64 * 128
    cost = 3 * sending  # of the products alone
    model.matrices = [dataclasses.replace(matrix, cost=cost) for matrix in model.matrices]
    expected = min((1, 2, 4, 8), key=lambda copies: max(count * cost / (4 * copies), cost) + copies * sending)
    groups = {}
    for rank in model.ranks:
        ((ranks, matrices),) = kernel.plan.exchanges.replica_groups(model.matrices, rank).items()
        assert rank in ranks
        assert [matrix.key for matrix in matrices] == [matrix.key for matrix in model.matrices]
        groups[rank] = ranks
        for matrix, whole in zip(matrices, model.matrices):  # everybody has what it had
            assert matrix.part(rank) == whole.part(rank)
            assert matrix.shards.layout.copies == expected
    assert sorted(itertools.chain(*set(groups.values()))) == list(model.ranks)
    assert all(groups[other] == ranks for ranks in groups.values() for other in ranks)


def test_useful_copies_follow_from_copied_matrices_and_their_largest(kernel):
    """Six equal ones are worth two copies; a cheap one beside them, or a dear one without copies, changes nothing."""
    copied, alone = (even_plan(kernel, Layout((8, 4), splits), 7)[0].matrices for splits in (("r", "0"), ("0", "1")))
    sending = kernel.plan.costs.FLOPS_OF_AN_ELEMENT * 64 * 128
    costs = [1] + [16 * sending] * 6
    matrices = [dataclasses.replace(matrix, cost=cost) for matrix, cost in zip(copied, costs)]
    matrices.append(dataclasses.replace(alone[0], cost=1000 * sending))
    shared, whole = kernel.plan.exchanges.replica_groups(matrices, 0).values()
    assert [len(shared), len(whole)] == [7, 1] and {matrix.shards.layout.copies for matrix in shared} == {2}


def work_of_plan(repository: Path, kernel, *case: int) -> tuple[float, float]:
    """Return how many lines a plan for these ranks, copies and parameters executes, and the megabytes it takes."""
    variants = Path(kernel.__file__).parents[1]
    command = [sys.executable, "-m", "tests.support.large_plan", *map(str, (variants, *case))]
    done = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    return tuple(map(float, done.stdout.split()))


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 16])
def test_a_plan_grows_linearly_and_takes_at_most_200_mb(repository, kernel, copies):
    """Four times the parameters and ranks take 4 times the work, 4.7 with a factor log n, 16 where all of both meet."""
    lines, megabytes = work_of_plan(repository, kernel, 4096, copies, 10_000)
    fewer_lines, _ = work_of_plan(repository, kernel, 1024, copies, 2_500)
    assert lines <= 5 * fewer_lines
    assert megabytes <= 200.0


def test_a_rank_where_triton_cannot_launch_says_so_to_the_others(kernel, monkeypatch):
    """It takes torch's products, and copies that others multiply by Triton's would drift apart."""
    plan, cuda = kernel.plan.plan, torch.device("cuda", 0)
    matrix = SimpleNamespace(parameter=SimpleNamespace(sharers=(0, 1)), measured_as=(cuda, torch.float16, (64, 64)))
    monkeypatch.setattr(plan, "tasks_of", lambda *_: [])
    lines = []
    for fault in ("", "no C compiler"):
        monkeypatch.setattr(plan, "triton_fault", lambda device, fault=fault: fault)
        lines.append(plan.failures([matrix])[0, 1])
    assert lines == ["failed here: nothing", "failed here: Triton (no C compiler)"]
