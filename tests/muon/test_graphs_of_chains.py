"""Graphs of several batches, which share products on a GPU, on a device that simulates them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

from tests.support.graphs_of_updates import SETTINGS
from tests.support.inside import plan_of


def parameters_of_one_short_side() -> list[tuple[str, Parameter]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(12, cols, generator=generator) for cols in (20, 28)]
    return [(f"layers.{i}.weight", Parameter(value)) for i, value in enumerate(values)]


def test_batches_with_a_graph_are_counted_and_not_their_chains(kernel, simulated, monkeypatch):
    """On a GPU several batches may share a graph."""
    graphs, long, short = kernel.step.graphs.UpdateGraphs(), (mock.Mock(), mock.Mock()), (mock.Mock(),)
    monkeypatch.setattr(kernel.step.graphs, "_whole", lambda chain, groups: chain)
    graphs._replays = {long: None}
    assert graphs.described([long, short], []) == ["2 of 3 batches replay a CUDA graph, captured by warmup()"]


@pytest.mark.parametrize("odd", [None, 0, 1])
def test_a_graph_of_several_batches_is_used_if_all_of_them_have_the_bits_of_eager_ones(
    kernel, simulated, monkeypatch, odd
):
    optimizer, honest = kernel.Muon(parameters_of_one_short_side(), **SETTINGS), simulated.captured
    chain, graphs = plan_of(optimizer).batches, kernel.step.graphs.UpdateGraphs()

    def captured(work, device, pool):
        (members,), replay = work.args, honest(work, device, pool)
        return lambda: [replay(), odd is None or members[odd].factors.mul_(2.0)]

    monkeypatch.setattr(kernel.step.graphs, "captured", captured)
    with nullcontext() if odd is None else pytest.warns(RuntimeWarning, match="other bits than eager launches"):
        for stage in graphs.stages([chain], optimizer.param_groups):
            stage()
    replayed = 2 if odd is None else 0
    said = f"{replayed} of 2 batches replay a CUDA graph, captured by warmup()"
    assert graphs.described([chain], optimizer.param_groups) == [said]


def test_chains_take_turns_in_the_memory_of_the_largest(kernel):
    """On each device, and each batch of a chain begins where a new tensor could."""
    graphs = kernel.step.graphs

    def kind(count: int, shape: tuple[int, int], device: str = "cpu"):
        iteration = SimpleNamespace(work_dtype=torch.float16)
        return graphs.Kind(count, shape, False, torch.float32, iteration, None, 0.0, torch.device(device), ())

    small, large, elsewhere = (kind(1, (3, 5)),), (kind(2, (3, 5)), kind(3, (7, 9))), (kind(1, (3, 5), "meta"),)
    buffers = {}
    graphs._make_room([elsewhere, small, large], buffers)
    assert {device.type for device in buffers} == {"cpu", "meta"}
    views = buffers[torch.device("cpu")].views(large)
    assert [[(x.shape, x.dtype) for x in of_batch] for of_batch in views] == [
        [((each.count, *each.packed_shape), dtype) for dtype in (torch.float32, torch.float16)] for each in large
    ]
    for first, second in zip(*views):
        assert first.storage_offset() == 0 and second.storage_offset() * second.element_size() == 512


def test_graphs_on_a_gpu_share_a_pool(kernel, monkeypatch):
    """Each would else keep memory of its own."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    buffers = SimpleNamespace(_factors=SimpleNamespace(is_cuda=True))
    kernel.step.graphs._Buffers.take_pool(buffers)
    assert buffers.pool == "a pool"
