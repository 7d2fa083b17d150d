"""Whole vectors for torch's fused AdamW, short tensors joined: the same bits, and few calls that wait for all threads.

In whole vectors the kernel computes an element from this element's numbers alone, wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

SETTINGS = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, maximize=False)
# Vectors, a matrix, some that end within a vector of the kernel, an empty one, and two too long to be joined.
SHAPES = [(64,), (8, 32), (70,), (3,), (1 << 15,), (0,), ((1 << 15) + 32,), ((1 << 15) + 37,)]
EMPTY = SHAPES.index((0,))
COUNTS = {"as often": [2.0] * len(SHAPES), "not as often": [2.0, 7.0, 2.0, 7.0, 2.0, 5.0, 3.0, 3.0]}

pytestmark = pytest.mark.kernels_ci


@pytest.fixture(params=(1, 2))
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(kernel, counts: list[float], dtype: torch.dtype = torch.float32):
    """Return tensors of parameters with SHAPES."""
    generator = torch.Generator().manual_seed(0)
    columns = [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(4)]
    columns[3] = [square.abs() for square in columns[3]]
    return kernel.rules.fallback.FallbackTensors(*columns, [torch.tensor(count) for count in counts])


def take_steps(kernel, tensors, scaling=(None, None), **changes) -> None:
    rule = kernel.rules.fallback.FallbackRule(**{**SETTINGS, **changes})
    for _ in range(2):
        kernel.rules.adamw.adamw_(tensors, rule, kernel.rules.scaling.GradientScaling(*scaling))


def each_alone(tensors) -> Iterator:
    for entry in zip(*tensors):
        yield type(tensors)(*([t] for t in entry))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [{}, dict(decay_mode="cautious"), dict(maximize=True)], ids=str)
def test_a_tensor_gets_the_same_bits_alone_and_among_others(kernel, threads, changes, dtype, counts):
    together, alone = drawn(kernel, counts, dtype), drawn(kernel, counts, dtype)
    take_steps(kernel, together, **changes)
    for tensors in each_alone(alone):
        take_steps(kernel, tensors, **changes)
    assert all(map(torch.equal, [t for column in together for t in column], [t for column in alone for t in column]))
    same = list(map(torch.equal, together.parameters, drawn(kernel, counts, dtype).parameters))
    assert same == [shape == (0,) for shape in SHAPES]


def test_shards_have_the_bits_of_the_whole(kernel, threads):
    """Also of tensors that are too long to be joined, and wherever the ends of their last shards are."""
    whole = drawn(kernel, COUNTS["not as often"])
    shards = type(whole)(
        *(
            [shard for t in column for shard in t.view(-1).split(1001)]
            for column in drawn(kernel, [2.0] * len(SHAPES))[:4]
        ),
        [step.clone() for step, p in zip(whole.steps, whole.parameters) for _ in p.view(-1).split(1001)],
    )
    for tensors in (whole, shards):
        take_steps(kernel, tensors)
    for columns in zip(whole[:4], shards[:4]):
        assert torch.equal(*(torch.cat([t.flatten() for t in column]) for column in columns))


def test_dense_tensors_in_another_order_of_memory_are_joined_with_others(kernel, threads):
    """As embeddings stored by columns, and patch embeddings of models in channels_last."""
    orders = [
        lambda t: t.reshape(4, 8).t().contiguous().t(),
        lambda t: t.reshape(2, 4, 2, 2).to(memory_format=torch.channels_last),
        lambda t: t.reshape(4, 8),
    ]
    plain = kernel.rules.fallback.FallbackTensors(
        *([t.flatten()[:32].clone() for t in column[:3]] for column in drawn(kernel, [2.0] * 7)[:4]),
        [torch.tensor(2.0) for _ in orders],
    )
    turned = plain._replace(
        **{field: [order(t) for order, t in zip(orders, getattr(plain, field))] for field in plain._fields[:4]},
        steps=[step.clone() for step in plain.steps],
    )
    for tensors in (plain, turned):
        take_steps(kernel, tensors)
    for order, *columns in zip(orders, *plain[:4], *turned[:4]):
        assert all(torch.equal(order(p), q) for p, q in zip(columns[:4], columns[4:]))


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_gradients_stay_scaled_and_an_overflow_changes_nothing(kernel, threads, overflow):
    scaling = torch.tensor([8.0]), torch.tensor([overflow])
    tensors, alone, before = (drawn(kernel, COUNTS["as often"]) for _ in range(3))
    take_steps(kernel, tensors, scaling)
    for each in each_alone(alone):
        take_steps(kernel, each, scaling)
    assert all(all(map(torch.equal, *columns)) for columns in zip(tensors, alone))
    filled = [[column[:EMPTY] + column[EMPTY + 1 :] for column in each] for each in (tensors, before)]
    kept = [list(map(torch.equal, *columns)) for columns in zip(*filled)]
    assert all(kept[1]) and all(any(column) == all(column) == bool(overflow) for column in (kept[0], *kept[2:]))


def test_the_kernel_waits_once_for_all_short_tensors(kernel, threads):
    """Three counts take three calls, the long tensors one, and an empty one none, whatever its count.

    With one thread it waits for none, and copies ends alone.
    """
    called = []

    def call(parameters: list[Tensor], *others, **numbers) -> None:
        called.append(list(map(Tensor.numel, parameters)))
        fused(parameters, *others, **numbers)

    fused = torch._fused_adamw_
    tensors = drawn(kernel, COUNTS["not as often"])
    with patch.object(torch, "_fused_adamw_", call):
        kernel.rules.adamw.adamw_(tensors, kernel.rules.fallback.FallbackRule(**SETTINGS))
    # The last 5 elements of the longest are a vector of their own.
    long = [(1 << 15) + 32, (1 << 15) + 32]
    short = [[64, 256, 1 << 15, *long], [96], [32]] if threads == 1 else [long, [64 + 70 + (1 << 15) + 26], [256 + 32]]
    assert sorted(called) == sorted([*short, [32]])


def test_joined_vectors_have_a_longest_length(kernel, monkeypatch):
    short_vectors = kernel.rules.short_vectors
    monkeypatch.setattr(short_vectors, "JOINED", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    tensors = kernel.rules.fallback.FallbackTensors(
        *([torch.ones(48) for _ in range(5)] for _ in range(4)), [torch.tensor(1.0)] * 5
    )
    lengths = []
    short_vectors.update_joined_(lambda each: lengths.append([len(p) for p in each.parameters]), tensors)
    assert lengths == [[96], [96], [64]]


def test_a_version_counts_each_step(kernel, threads):
    """Autograd notices a parameter that was changed after it was saved for a backward pass."""
    tensors = drawn(kernel, COUNTS["as often"])
    before = [p._version for p in tensors.parameters]
    kernel.rules.adamw.adamw_(tensors, kernel.rules.fallback.FallbackRule(**SETTINGS))
    assert all(p._version > version for p, version in zip(tensors.parameters, before))


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_traced_step_has_the_bits_of_the_step(kernel, threads, mode):
    """Its counts are not known while it is traced: equal ones may be unlike when it runs."""
    size = len(SHAPES)

    def step(*flat: Tensor) -> None:
        columns = ([*flat[i : i + size]] for i in range(0, len(flat), size))
        take_steps(kernel, kernel.rules.fallback.FallbackTensors(*columns))

    graph = make_fx(step, tracing_mode=mode)(*chain(*drawn(kernel, COUNTS["as often"])))
    traced, tensors = (drawn(kernel, COUNTS["not as often"]) for _ in range(2))
    graph(*chain(*traced))
    take_steps(kernel, tensors)
    assert all(map(torch.equal, chain(*traced), chain(*tensors)))
