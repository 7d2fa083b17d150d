"""Which matrices whose Gram matrices ranks sum share a batch."""

from __future__ import annotations

import pytest
import torch

from tests.support import inside

EVERYBODY = "everybody"


def test_halves_of_fused_rows_share_no_batch_of_sums(kernel):
    """Of which a rank has rows of one alone; halves with one place do, of several parameters."""
    layout = inside.layout(kernel, (8, 2), [2], range(2), [(0, 1)])
    shards = inside.shards(kernel, inside.matrix_view(kernel, (8, 2), split_rows=(4, 4)), layout)
    halves = [inside.matrix(kernel, number, half, shards) for number in range(2) for half in range(2)]
    for matrix in halves:
        matrix.parameter.family = "one"
    keys = list(map(kernel.plan.gram_sums._batch_key, halves))
    assert keys[:2] == keys[2:] and keys[0] != keys[1]


@pytest.mark.parametrize(
    "device, chunk_bytes, expected",
    [("cuda", 1, [1, 1, 1]), ("cuda", 5000, [1, 2]), ("cuda", None, [3]), ("cpu", None, [1, 1, 1])],
)
def test_a_batch_of_sums_packs_at_most_chunk_bytes_or_one_matrix(kernel, device, chunk_bytes, expected):
    """Of each a rank has 2,400 bytes. On a CPU a batch is one matrix."""
    layout = inside.layout(kernel, (6, 400), [4], range(4), [(1, 1)])
    shards = inside.shards(kernel, inside.matrix_view(kernel, (6, 400)), layout)
    matrices = [inside.matrix(kernel, number, 0, shards) for number in range(3)]
    for matrix in matrices:
        vars(matrix.parameter).update(family="one", device=torch.device(device))
    (batches,) = kernel.plan.gram_sums.plan_sums(matrices, 0, chunk_bytes)
    assert [len(batch.matrices) for batch in batches] == expected


def test_matrices_of_unlike_families_share_no_batch_of_sums(kernel):
    """A batch has one momentum, one eps and one schedule."""
    layout = inside.layout(kernel, (6, 400), [4], range(4), [(1, 1)])
    shards = inside.shards(kernel, inside.matrix_view(kernel, (6, 400)), layout)
    matrices = [inside.matrix(kernel, number, 0, shards) for number in range(3)]
    for matrix, family in zip(matrices, ("one", "other", "one")):
        vars(matrix.parameter).update(family=family, device=torch.device("cuda"))
    (batches,) = kernel.plan.gram_sums.plan_sums(matrices, 0, None)
    assert [batch.matrices for batch in batches] == [(matrices[0], matrices[2]), (matrices[1],)]
