"""Owners whose batches share m x m products as on a GPU, here on CPUs: the bits are those of one process without it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.support.pieces import put_together
from tests.support.sharded_models import Case, Layout, Spec, assert_same, train, train_alone
from tests.support.shared_products import shared_as_on_a_gpu

LAYOUT = Layout((2,), ("0",))
SIZES = [(12, 20), (30, 12), (12, 20), (12, 40), (8, 24), (12, 20), (30, 12), (12, 40)]


def train_sharing(kernel, case: Case):
    """The job of every rank: train its parts, with shared products; returns them, and the most that shared some."""
    update = kernel.step.polar_update
    shared, work = [0], update.chained_polar_factors

    def counted(operands):
        shared.append(len(operands))
        return work(operands)

    with shared_as_on_a_gpu(kernel), mock.patch.object(update, "chained_polar_factors", counted):
        return train(kernel, case), max(shared)


@pytest.mark.parametrize("chunk_bytes, shares", [(None, True), (1, False)])
@pytest.mark.parametrize("missing", ["nowhere", "here and there"])
def test_owners_share_products_within_a_chunk(kernel, pools, missing, chunk_bytes, shares):
    if not kernel.iteration.select_products(torch.device("cpu"), torch.float32, 12, 20, method="gram").batched:
        pytest.skip("needs products of this processor whose bits do not depend on the batch")
    specs = tuple(Spec(f"layers.{i}.up.weight", size, LAYOUT) for i, size in enumerate(SIZES))
    settings = {"ns_dtype": "float32", "ns_method": "gram", "chunk_bytes": chunk_bytes}
    case = Case(specs, settings, steps=3, missing=missing)
    pieces, most = zip(*pools(2).run(train_sharing, case))
    results = put_together(pieces)
    alone = train_alone(kernel, case, results[0].holders)
    for result in results:
        assert_same(case, result, alone)
    assert [count > 1 for count in most] == [shares, shares]
