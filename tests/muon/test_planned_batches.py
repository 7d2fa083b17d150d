"""Which matrices are packed together, which batches share products, and how much memory a batch asks for."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.support import inside

SHAPE = 12, 25
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def matrices_on(kernel, device: str, shapes, method="gram", packed=FLOAT32, work=FLOAT32, **products):
    """Return a matrix of each shape on a device, of parameters whose steps take one recipe."""
    table = kernel.kernels.products.BATCHED._replace(**products)
    iteration, result = kernel.iteration.Iteration(method, (), 1.0, work, work, table), []
    for number, shape in enumerate(shapes):
        layout = inside.layout(kernel, shape, [1], range(1), [None])
        shards = inside.shards(kernel, inside.matrix_view(kernel, shape), layout)
        matrix = dataclasses.replace(inside.matrix(kernel, number, 0, shards), iteration=iteration)
        changes = {"device": torch.device(device), "packed_dtype": packed, "family": device, "offloaded": False}
        vars(matrix.parameter).update(changes)
        result.append(matrix)
    return result


@pytest.fixture
def three_together(kernel, monkeypatch):
    """Matrices are worked on three at a time, on every device."""
    monkeypatch.setattr(kernel.plan.batches, "matrices_together", lambda *_: 3)


def lengths(batches) -> list[int]:
    return [len(batch.matrices) for batch in batches]


@pytest.mark.parametrize(
    "device, packed, chunk_bytes, expected",
    [
        ("cuda", FLOAT32, None, [6]),
        ("cuda", FLOAT32, 4 * 1200, [3, 3]),
        ("cuda", FLOAT32, 4 * 1200 - 1, [3, 3]),
        ("cuda", FLOAT32, 3 * 1200 - 1, [2, 2, 2]),
        ("cuda", BFLOAT16, 3 * 1200, [6]),
        ("cuda", FLOAT32, 1, [1] * 6),
        ("cpu", FLOAT32, None, [3, 3]),
        ("cpu", FLOAT32, 6 * 1200, [6]),
        ("cpu", FLOAT32, 1, [1] * 6),
    ],
)
def test_a_batch_packs_what_chunk_bytes_hold(kernel, three_together, device, packed, chunk_bytes, expected):
    """In float32 a matrix has 1,200 bytes. Without a limit, a CPU packs those that it works on together."""
    matrices = matrices_on(kernel, device, [SHAPE] * 6, packed=packed)
    assert lengths(kernel.plan.batches.plan_batches(matrices, chunk_bytes)) == expected


@pytest.mark.parametrize("device, chunk_bytes", [("cuda", None), ("cuda", 2**20), ("cpu", None), ("cpu", 2**20)])
def test_what_is_multiplied_one_at_a_time_is_packed_so(kernel, three_together, device, chunk_bytes):
    matrices = matrices_on(kernel, device, [SHAPE] * 6, batched=False)
    assert lengths(kernel.plan.batches.plan_batches(matrices, chunk_bytes)) == [1] * 6


def test_tall_matrices_are_transposed_on_a_cpu_alone(kernel):
    for device, shape in itertools.product(["cpu", "cuda"], [(25, 12), (12, 25), (12, 12)]):
        (batch,) = kernel.plan.batches.plan_batches(matrices_on(kernel, device, [shape]))
        assert batch.transposed == (device == "cpu" and shape == (25, 12))
        assert batch.packed_shape == ((12, 25) if batch.transposed else shape)


def test_batches_share_products_on_one_device_alone(kernel):
    """As in a model whose layers lie on two GPUs of one process."""
    first, second = (matrices_on(kernel, f"cuda:{i}", [(12, 25), (30, 12)]) for i in range(2))
    chains = kernel.plan.batches.chains(kernel.plan.batches.plan_batches([*first, *second]))
    assert [[str(batch.device) for batch in chain] for chain in chains] == [["cuda:0"] * 2, ["cuda:1"] * 2]


@pytest.mark.parametrize("method, squares", [("standard", 2), ("gram", 4)])
def test_squares_are_as_many_as_matrices_are_worked_on_together(kernel, three_together, method, squares):
    """In the iteration's dtype, as the factors are; directions keep theirs."""
    calls = {"gram_newton_schulz": lambda *_: None}
    matrices = matrices_on(kernel, "cpu", [SHAPE] * 6, method, BFLOAT16, **calls)
    (batch,) = kernel.plan.batches.plan_batches(matrices, 2**20)
    for count in (6, 3, 2):
        sizes = [((count, *SHAPE), BFLOAT16), ((count, *SHAPE), FLOAT32)]
        assert batch.memory(count) == [*sizes, *[((min(count, 3), 12, 12), FLOAT32)] * squares]
    assert batch.memory_bytes == 6 * 300 * (2 + 4) + squares * 3 * 144 * 4
    assert batch.packed_bytes == 6 * 300 * 2


ONE = 300 * (8 + 4)  # a matrix in float64, and in float32 what normalises it
ALL = 6 * 300
RULES = {
    "none": ({}, 3 * ONE, 3 * ONE),
    "equalized": ({"before": "rows"}, 4 * ALL + 8 * ALL, 4 * ALL + 3 * ONE),
    "renormalized": ({"after": "rows"}, 8 * ALL, 3 * ONE),
    "second moments": (None, 8 * ALL, 3 * ONE),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("in_place", [False, True])
def test_work_beside_that_memory_is_the_largest_of_what_follows_one_another(
    kernel, monkeypatch, three_together, rule, in_place
):
    """All directions equalized, then three matrices in the iteration; or, without a pass in place, all divided."""
    monkeypatch.setattr(kernel.plan.batches, "has_native_passes", lambda _, dtype: in_place and dtype == torch.float64)
    settings, *expected = RULES[rule]
    matrices = matrices_on(kernel, "cuda", [SHAPE] * 6, "standard", work=torch.float64)
    for matrix in matrices:
        vars(matrix.parameter).update(equalization=kernel.rules.equalization.Equalization(**settings or {}))
        if settings is None:
            vars(matrix.parameter).update(moments_view=SimpleNamespace(shapes=[(12, 1)]))
    (batch,) = kernel.plan.batches.plan_batches(matrices)
    assert batch.work_bytes == expected[in_place]
    chain = (batch, batch)
    assert kernel.plan.batches.bytes_of_chain(chain) == 2 * (batch.memory_bytes + batch.work_bytes)
