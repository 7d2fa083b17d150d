"""When batches have CUDA graphs, when they do not, and what is said of it, on a device that simulates them.

`test_replayed_steps.py` compares bits, there and on a GPU.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.graphs_of_updates import (
    FORBIDDEN,
    INVALIDATED,
    SETTINGS,
    counted_graphs,
    parameters,
    same_bits,
    steps,
)
from tests.support.inside import plan_of


def test_each_kind_of_batch_is_captured_once_and_each_batch_replayed(kernel, simulated):
    """There are two shapes. Processors without bfloat16 take one matrix a batch, so batches of a kind share a graph."""
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    said = []
    optimizer.warmup(lambda done, total, what: said.append(what))
    assert sum(what.startswith("capture") for what in said) == simulated.captures == 2
    before = simulated.replays
    steps(optimizer, 1)
    assert simulated.replays - before == len(plan_of(optimizer).batches)


@pytest.mark.parametrize("shape", [(5, 300, 70), (5, 70, 300), (5, 70, 70)], ids=str)
def test_norms_of_a_capture_are_those_that_packing_brings(kernel, shape):
    """To the bit, of tall matrices, too: a GPU packs them as they are. Owners of others' matrices take such norms."""
    momentum, gradients = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    norms, directions = torch.empty(shape[0], dtype=torch.float64), torch.empty(shape)
    kernel.kernels.native.momentum_pack_(list(momentum), list(gradients), directions, 0.9, True, norms=norms)
    packed = kernel.step.polar_update.Packed(None, 0.0, directions, torch.empty_like(norms))
    packed.take_norms_()
    assert torch.equal(packed.norms, norms)


def test_a_step_that_is_captured_whole_is_eager(kernel, simulated, monkeypatch):
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    optimizer.warmup(lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = simulated.replays
    steps(optimizer, 1)
    assert simulated.replays == before


def test_a_graph_with_other_bits_is_not_used(kernel, simulated, monkeypatch):
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    honest = simulated.captured

    def wrong(work, device, pool):
        replay = honest(work, device, pool)
        return lambda: [replay(), *map(double_one, work.args)]

    def double_one(members) -> None:
        members[0].factors.view(-1)[0] *= 2.0

    monkeypatch.setattr(kernel.step.graphs, "captured", wrong)
    with pytest.warns(RuntimeWarning, match="other bits than eager launches"):
        optimizer.warmup(lambda *_: None)
    before = simulated.replays
    assert same_bits(steps(optimizer), steps(kernel.Muon(parameters(), **SETTINGS)))
    assert simulated.replays == before


def test_a_graph_that_writes_nothing_is_not_used(kernel, simulated, monkeypatch):
    """What it should have written is there from before its capture."""

    def idle(work, device, pool):
        work()
        return lambda: None

    monkeypatch.setattr(kernel.step.graphs, "captured", idle)
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    with pytest.warns(RuntimeWarning, match="other bits than eager launches"):
        optimizer.warmup(lambda *_: None)
    assert same_bits(steps(optimizer), steps(kernel.Muon(parameters(), **SETTINGS)))


def test_nothing_is_said_of_graphs_where_there_are_none(kernel):
    assert not any("CUDA graph" in note for note in kernel.Muon(parameters(), **SETTINGS).explain().notes)


def test_a_second_warm_up_drops_the_graphs_of_the_first(kernel, simulated, monkeypatch):
    """All graphs share memory, which is made anew."""

    def refuse(work, device, pool):
        raise RuntimeError(FORBIDDEN)

    optimizer = kernel.Muon(parameters(), **SETTINGS)
    optimizer.warmup(lambda *_: None)
    monkeypatch.setattr(kernel.step.graphs, "captured", refuse)
    with pytest.warns(RuntimeWarning, match="is launched eagerly") as warned:
        optimizer.warmup(lambda *_: None)
    assert {warning.filename for warning in warned} == {__file__}
    assert f"0 of {len(plan_of(optimizer).batches)} batches replay a CUDA graph" in str(optimizer.explain())


def test_the_graphs_after_one_that_broke_have_another_pool(kernel, simulated, monkeypatch):
    """Torch takes no other graph into that of a capture that broke."""
    pools, honest = [], simulated.captured

    def break_the_first(work, device, pool):
        pools.append(pool)
        if len(pools) == 1:
            raise RuntimeError(FORBIDDEN)
        return honest(work, device, pool)

    take_pool = kernel.step.graphs._Buffers.take_pool
    monkeypatch.setattr(kernel.step.graphs, "captured", break_the_first)
    monkeypatch.setattr(
        kernel.step.graphs._Buffers, "take_pool", lambda self: take_pool(self) or setattr(self, "pool", object())
    )
    with pytest.warns(RuntimeWarning, match="is launched eagerly"):
        kernel.Muon(parameters(), **SETTINGS).warmup(lambda *_: None)
    assert len(pools) > 1 and pools[0] not in pools[1:]


@pytest.mark.parametrize("said", [FORBIDDEN, INVALIDATED], ids=["forbidden", "invalidated"])
def test_what_cannot_be_captured_stays_eager_and_says_so(kernel, simulated, monkeypatch, said):
    def refuse(work, device, pool):
        raise RuntimeError(said)

    monkeypatch.setattr(kernel.step.graphs, "captured", refuse)
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    with pytest.warns(RuntimeWarning, match=f"is launched eagerly: it cannot be captured .*{said.splitlines()[0]}"):
        optimizer.warmup(lambda *_: None)
    assert same_bits(steps(optimizer), steps(kernel.Muon(parameters(), **SETTINGS)))


@pytest.mark.gpu
def test_other_chains_are_captured_after_one_that_broke(kernel, monkeypatch):
    with counted_graphs(kernel, "cuda") as counted:
        honest = counted.captured

        def break_the_first(work, device, pool):
            forbidden = torch.cuda.synchronize if counted.captures == 0 else lambda: None
            return honest(lambda: [work(), forbidden()], device, pool)

        monkeypatch.setattr(kernel.step.graphs, "captured", break_the_first)
        optimizer = kernel.Muon(parameters("cuda"), **SETTINGS)
        with pytest.warns(RuntimeWarning, match="is launched eagerly: it cannot be captured"):
            optimizer.warmup(lambda *_: None, budget=0)
        assert len(optimizer._graphs._replays) == counted.captures - 1 > 0


def test_a_gpu_lost_in_a_capture_is_an_error(kernel, simulated, monkeypatch):
    def lose(work, device, pool):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nat capture_end()")

    monkeypatch.setattr(kernel.step.graphs, "captured", lose)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernel.Muon(parameters(), **SETTINGS).warmup(lambda *_: None)


def test_graphs_can_be_switched_off_and_are_explained(kernel, simulated):
    off = kernel.Muon(parameters(), cuda_graphs=False, **SETTINGS)
    off.warmup(lambda *_: None)
    steps(off)
    assert simulated.captures == 0 and "CUDA graph" not in str(off.explain())
    on = kernel.Muon(parameters(), **SETTINGS)
    count = len(plan_of(on).batches)
    assert f"0 of {count} batches replay a CUDA graph, captured by warmup()" in on.explain().notes
    on.warmup(lambda *_: None)
    assert f"{count} of {count} batches replay a CUDA graph, captured by warmup()" in on.explain().notes


def test_copies_are_eager_and_loading_keeps_graphs(kernel, simulated):
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    optimizer.warmup(lambda *_: None)
    optimizer.load_state_dict(optimizer.state_dict())
    before = simulated.replays
    steps(optimizer, 1)
    assert simulated.replays > before
    before = simulated.replays
    steps(copy.deepcopy(optimizer), 1)
    assert simulated.replays == before


def test_nothing_is_captured_on_a_cpu(kernel):
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    said = []
    optimizer.warmup(lambda done, total, what: said.append(what))
    assert said and not any("capture" in what or "graph" in what for what in said)


def test_a_capture_sees_neither_autocast_nor_gradients(kernel, simulated, monkeypatch):
    """Replays would go on computing as a warm-up's surroundings had it."""
    seen, honest = [], simulated.captured

    def captured(work, device, pool):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return honest(work, device, pool)

    monkeypatch.setattr(kernel.step.graphs, "captured", captured)
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        kernel.Muon(parameters(), **SETTINGS).warmup(lambda *_: None)
    assert seen and {*seen} == {(False, False)}


def test_cuda_graphs_must_be_a_flag(kernel):
    with pytest.raises(TypeError, match="cuda_graphs"):
        kernel.Muon(parameters(), cuda_graphs="yes")


def test_groups_of_other_settings_have_graphs_of_their_own(kernel, simulated):
    def grouped():
        rows = [(f"other.{name}", p) for name, p in parameters()[:3]]
        return [{"params": parameters()[:3]}, {"params": rows, "renormalize": "rows"}]

    eager, replayed = (kernel.Muon(grouped(), **SETTINGS) for _ in range(2))
    replayed.warmup(lambda *_: None)
    assert same_bits(steps(replayed), steps(eager))
    assert simulated.replays > simulated.captures


def test_tall_matrices_that_are_packed_like_wide_ones_have_a_graph_of_their_own(kernel, simulated):
    """Their updates are transposed."""

    def made():
        generator = torch.Generator().manual_seed(0)
        shapes = {"layers.0.weight": (12, 20), "layers.1.weight": (20, 12)}
        return [(name, torch.nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]

    eager, replayed = (kernel.Muon(made(), **SETTINGS) for _ in range(2))
    replayed.warmup(lambda *_: None)
    assert same_bits(steps(replayed), steps(eager)) and simulated.captures == 2
