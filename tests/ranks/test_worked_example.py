"""The worked example in the header of plan/messages.py, and blocks that a step copies at once."""

from __future__ import annotations

import numpy as np
import torch

from tests.support import inside


def example(kernel):
    """Return rank 0's messages for rows of A (4 x 2) and of B (2 x 2) on two ranks."""
    matrices = []
    for number, (shape, cost) in enumerate([((4, 2), 2), ((2, 2), 1)]):
        layout = inside.layout(kernel, shape, (2,), (0, 1), ((0, 1),))
        shards = inside.shards(kernel, inside.matrix_view(kernel, shape), layout)
        matrices.append(inside.matrix(kernel, number, 0, shards, cost))
    (messages,), _ = inside.plan_messages(kernel, matrices, (0, 1), 0, 100)
    return messages


def test_the_messages_are_those_of_the_header(kernel):
    holder, owner, assignments = example(kernel)
    assert [(matrix.key, workers) for matrix, workers in assignments] == [((0, 0), (0,)), ((1, 0), (1,))]
    assert (holder.sent, owner.received, owner.sent, holder.received) == ((8, 4), (8, 8), (8, 8), (8, 4))
    assert [(part.direction, part.gathered.flag) for part in holder.parts] == [(0, 4), (8, 10)]
    assert [(part.gathered.elements, part.gathered.flag) for part in owner.parts] == [(0, 4), (8, 12)]
    assert [(part.scattered.elements, part.scattered.flag) for part in owner.parts] == [(0, 4), (8, 12)]
    assert [(part.scattered.elements, part.scattered.flag) for part in holder.parts] == [(0, 4), (8, 10)]


def test_like_parts_in_a_row_are_one_block(kernel):
    """Each block is as the step copies it: the strides of the plan give the elements that the parts have."""
    view = inside.matrix_view(kernel, (8, 6))
    for splits in (((0, 1),), ((1, 1),), ((0, 2),)):
        shards = inside.shards(kernel, view, inside.layout(kernel, (8, 6), (2,), (0, 1), splits))
        matrices = [inside.matrix(kernel, number, 0, shards) for number in range(6)]
        (messages,), _ = inside.plan_messages(kernel, matrices, (0, 1), 0, 10**6)
        owner = messages.owner
        parts = inside.gathered_parts(owner)
        blocks = kernel.plan.blocks.blocks_of(parts)
        runs = sum(len(part.rows) * len(part.cols) for _, part, _ in parts)
        # Rows that FSDP2 has cut behind another split lie in two runs, which alternate in a message.
        assert len(blocks) == (2 if splits != ((0, 2),) else runs)
        buffer = torch.arange(sum(owner.received)).float()
        batch = torch.full((len(owner.matrices), 8, 6), -1.0)
        kernel.kernels.native.move_blocks_(batch, buffer, kernel.step.local_chunk.block_table(blocks), False)
        expected = np.full(batch.shape, -1.0)
        for i, part, offset in parts:
            rows, cols = ([k for start, stop in runs for k in range(start, stop)] for runs in part)
            expected[i][np.ix_(rows, cols)] = buffer[offset : offset + part.size].reshape(len(rows), len(cols))
        np.testing.assert_array_equal(batch.numpy(), expected)
        assert (batch >= 0).all()
