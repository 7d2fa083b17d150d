"""The messages of the reference's pipeline, golden, beside ours.

Equal, where matrices go in the reference's order to the reference's owners: how many elements each pair of ranks
exchanges, which, and in which order, both ways. Ours differ in the flags that follow the elements of each message, one
for each part that is not empty. A real plan takes matrices in the order of their costs and picks owners of its own:
order and owners differ then, and no element; of equal costs owners are the reference's balanced ones.
"""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

import pytest
import torch

from tests.support import inside
from tests.support.random_plans import all_to_all, cut


class Copy(NamedTuple):
    """A layout with one copy."""

    copies: int = 1

    def copy_of(self, rank):
        return ()


class GoldenShards(NamedTuple):
    """Shards of one matrix with the golden split, which no DTensor has where it is uneven otherwise than in blocks."""

    view: object
    split: tuple[int, ...]
    dim: int
    Part: type
    layout: Copy = Copy()
    copies: int = 1

    def part(self, index, rank):
        start = sum(self.split[:rank])
        runs = ((start, start + self.split[rank]),) if self.split[rank] else ()
        (rows, cols), *_ = self.view.shapes
        return self.Part(*((runs, ((0, cols),)) if self.dim == 0 else (((0, rows),), runs)))

    def holders(self, index):
        return tuple(range(len(self.split)))

    def largest_part(self, index):
        return max(self.part(index, rank).size for rank in self.holders(index))

    def has_something(self, index, rank):
        return rank in self.holders(index)


class Pipeline:
    """A golden case: its matrices, as records of a plan, and what they hold."""

    def __init__(self, kernel, params, case):
        self.kernel, self.case, self.ranks = kernel, case, tuple(range(case["world_size"]))
        self.shapes = [tuple(shape) for _, shape in params]
        shards = [
            GoldenShards(inside.matrix_view(kernel, shape), tuple(split), case["shard_dim"], kernel.plan.shards.Part)
            for shape, split in zip(self.shapes, case["splits"])
        ]
        self.records = [inside.matrix(kernel, i, 0, one) for i, one in enumerate(shards)]
        for record in self.records:  # elements of 16 bytes, which need no padding: the golden messages have none
            record.parameter.packed_dtype = record.parameter.update_dtype = torch.complex128
        self.matrices = [
            1000 * i + torch.arange(rows * cols).view(rows, cols).float() for i, (rows, cols) in enumerate(self.shapes)
        ]

    def chunks(self):
        """Return the one chunk of the plan as each rank has it."""
        total = sum(matrix.numel() for matrix in self.matrices)
        plans = [inside.plan_messages(self.kernel, self.records, self.ranks, r, total)[0] for r in self.ranks]
        assert all(len(chunks) == 1 for chunks in plans)
        return [chunks[0] for chunks in plans]

    def parts(self, rank):
        """Return how many parts of each owner's matrices a rank has: as many flags go from one to the other."""
        counts = [0] * len(self.ranks)
        for record, owner in zip(self.records, self.case["owner"]):
            counts[owner] += record.part(rank).size > 0
        return counts

    def gathered(self, chunks):
        """Return what each rank sends to owners, and what comes."""
        sent = [torch.full((sum(side.holder.sent),), float("nan")) for side in chunks]
        for rank, (side, buffer) in enumerate(zip(chunks, sent)):
            for matrix, offset in ((held.matrix, held.direction) for held in side.holder.parts):
                part = torch.from_numpy(cut(self.values(matrix).numpy(), matrix.part(rank))).flatten()
                buffer[offset : offset + len(part)] = part
        return sent, self._exchanged([inside.lengths(side, "gather") for side in chunks], sent)

    def scattered(self, chunks, received):
        """Return what owners, who have made 2 x + 1 of what came, send back, and what comes."""
        sent = []
        for side, buffer in zip(chunks, received):
            owner = side.owner
            matrices = [torch.full((matrix.rows, matrix.cols), float("nan")) for matrix in owner.matrices]
            for i, matrix in enumerate(matrices):
                self._copy(
                    matrix, buffer, [part for part in inside.gathered_parts(owner) if part[0] == i], to_buffer=False
                )
            for matrix, numbers in zip(owner.matrices, matrices):
                assert torch.equal(numbers, self.values(matrix))
            sent.append(torch.full((sum(owner.sent),), float("nan")))
            for i, matrix in enumerate(matrices):
                parts = [part for part in inside.scattered_parts(owner) if part[0] == i]
                self._copy(2 * matrix + 1, sent[-1], parts, to_buffer=True)
        return sent, self._exchanged([inside.lengths(side, "scatter") for side in chunks], sent)

    def values(self, record):
        """Return what a matrix holds."""
        return self.matrices[record.parameter.number]

    def _copy(self, matrix, buffer, parts, to_buffer):
        """Copy the blocks of one matrix, as a step does."""
        blocks = self.kernel.plan.blocks.blocks_of((0, *rest) for _, *rest in parts)
        table = self.kernel.step.local_chunk.block_table(blocks)
        self.kernel.kernels.native.move_blocks_(matrix[None], buffer, table, to_buffer)

    def _exchanged(self, sides, buffers):
        return [torch.from_numpy(message) for message in all_to_all(sides, [buffer.numpy() for buffer in buffers])]


def elements(buffer) -> list[float]:
    """Return a buffer's elements without flags, which nobody has written."""
    return buffer[~buffer.isnan()].tolist()


@pytest.fixture
def golden(kernel, repository):
    data = json.loads((repository / "tests/golden/pipeline.json").read_text())
    return [Pipeline(kernel, data["params"], case) for case in data["cases"]]


@pytest.fixture
def golden_owners(kernel, monkeypatch):
    """Have plans hand matrices to the owners of a golden case, in order."""

    def follow(case):
        class Golden(kernel.plan.owners.Owners):
            def next_chunk(self):
                super().next_chunk()
                self._following = iter(case["owner"])

            def take(self, cost, candidates=None):
                return next(self._following)

        monkeypatch.setattr(kernel.plan.messages, "Owners", Golden)

    return follow


def test_message_lengths_are_the_golden_ones_plus_flags(golden, golden_owners):
    for pipeline in golden:
        golden_owners(pipeline.case)
        chunks = pipeline.chunks()
        for name in ("gather", "scatter"):
            counts = pipeline.case[name]
            for rank, side in enumerate(inside.lengths(chunk, name) for chunk in chunks):
                to_owners, from_holders = pipeline.parts(rank), [pipeline.parts(r)[rank] for r in pipeline.ranks]
                sent, received = (to_owners, from_holders) if name == "gather" else (from_holders, to_owners)
                assert list(side.sent) == [a + b for a, b in zip(counts["send_counts"][rank], sent)]
                assert list(side.received) == [a + b for a, b in zip(counts["recv_counts"][rank], received)]


def test_messages_hold_the_golden_elements_in_order(golden, golden_owners):
    for pipeline in golden:
        golden_owners(pipeline.case)
        chunks = pipeline.chunks()
        gathered = pipeline.gathered(chunks)
        for name, messages in ("gather", gathered), ("scatter", pipeline.scattered(chunks, gathered[1])):
            for key, buffers in zip(("send_buf", "recv_buf"), messages):
                assert list(map(elements, buffers)) == pipeline.case[name][key]


def test_owners_of_equal_matrices_are_the_golden_ones(golden):
    balanced = [pipeline for pipeline in golden if pipeline.case["mode"] == "balanced"]
    assert len(balanced) == 4
    for pipeline in balanced:
        assert all([each.owner for each in chunk.assignments] == pipeline.case["owner"] for chunk in pipeline.chunks())


def test_real_plan_exchanges_the_golden_elements(kernel, golden):
    """DTensors are split as `ceil` is; of costs that differ, order and owners are the plan's."""
    cases = [pipeline for pipeline in golden if pipeline.case["mode"] == "ceil"]
    assert len(cases) == 4
    for pipeline in cases:
        dim = pipeline.case["shard_dim"]
        for i, (record, shape) in enumerate(zip(pipeline.records, pipeline.shapes)):
            layout = inside.layout(kernel, shape, (len(pipeline.ranks),), pipeline.ranks, ((dim, 1),))
            shards = inside.shards(kernel, record.shards.view, layout)
            assert all(shards.part(0, rank).size == record.part(rank).size for rank in pipeline.ranks)
            pipeline.records[i] = inside.matrix(kernel, i, 0, shards, inside.flops(kernel, *shape))
        chunks = pipeline.chunks()
        _, received = pipeline.gathered(chunks)
        golden_elements = itertools.chain(*pipeline.case["gather"]["recv_buf"])
        assert sorted(itertools.chain(*map(elements, received))) == sorted(golden_elements)
        _, back = pipeline.scattered(chunks, received)
        assert [sorted(elements(buffer)) for buffer in back] == list(map(sorted, pipeline.case["scatter"]["recv_buf"]))
