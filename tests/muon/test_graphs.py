"""CUDA graphs of updates, on a device that simulates them: what is captured is done again at each replay.

Like a real graph, it reads and writes the same memory at each replay. What graphs share is spoiled before each step.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor

SETTINGS = dict(lr=2e-2, weight_decay=0.1)


class Simulated:
    """Graphs on the CPU; `replays` counts them, and `spoil` poisons what they share."""

    replays = captures = 0

    def captured(self, work, device, pool):
        self.captures += 1
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay

    def spoil(self, optimizer) -> None:
        for packed in optimizer._graphs._replays.values():
            packed.directions.fill_(math.nan)
            packed.take_norms_()  # NaN, too


@pytest.fixture
def simulated(kernel, monkeypatch) -> Simulated:
    graphs, simulated = kernel.step.graphs, Simulated()
    monkeypatch.setattr(graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "captured", simulated.captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return simulated


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.nn.Parameter]]:
    """Two shapes of matrices, tall ones among them, and a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 20)] * 3 + [(24, 8)] * 2 + [(20,)]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [(f"layers.{i}.weight", torch.nn.Parameter(value)) for i, value in enumerate(values)]


def steps(optimizer, count: int = 3, seed: int = 1, before=lambda step: None, missing=()) -> list[Tensor]:
    """Take steps with gradients from a seed, but for parameters in `missing`; return all parameters and momenta."""
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(count):
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if i in missing else gradient
        before(step)
        optimizer.step()
    return [p.detach().clone() for p in params]


def compare(kernel, simulated, settings=(), dtype=torch.float32, **options) -> None:
    """Parameters of a captured optimizer and of an eager one have the same bits after the same steps."""
    eager, replayed = (kernel.Muon(parameters(dtype), **{**SETTINGS, **dict(settings)}) for _ in range(2))
    replayed.warmup(lambda *_: None)
    expected = steps(eager, **options)
    before = options.pop("before", lambda step: None)

    def spoiled(step: int) -> None:
        simulated.spoil(replayed)
        before(step)

    actual = steps(replayed, before=spoiled, **options)
    assert simulated.replays > simulated.captures
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"release_grads": True},
        {"offload": True},
        {"ns_dtype": "float16"},
        {"decay_mode": "cautious", "equalize": "columns", "renormalize": "rows", "second_moment": "long_side"},
        {"equalize": "experimental_aurora", "experimental_hyperball": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replayed_steps_have_the_bits_of_eager_ones(kernel, simulated, settings, dtype):
    compare(kernel, simulated, settings, torch.float32 if "experimental_hyperball" in settings else dtype)


def test_each_kind_of_batch_is_captured_once_and_each_batch_replayed(kernel, simulated):
    """There are two shapes. Processors without bfloat16 take one matrix a batch, so batches of a kind share a graph."""
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    said = []
    optimizer.warmup(lambda done, total, what: said.append(what))
    assert sum(what.startswith("capture") for what in said) == simulated.captures == 2
    before = simulated.replays
    steps(optimizer, 1)
    assert simulated.replays - before == len(optimizer._plan.batches)


def test_rates_that_change_are_those_of_the_step(kernel, simulated):
    rates = 1e-2, 3e-2, 0.0
    eager, replayed = (kernel.Muon(parameters(), **SETTINGS) for _ in range(2))
    replayed.warmup(lambda *_: None)

    def schedule(optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = rates[step], 0.9 + step / 100

    expected = steps(eager, before=partial(schedule, eager))
    assert all(map(torch.equal, steps(replayed, before=partial(schedule, replayed)), expected))
    assert simulated.replays > simulated.captures


def test_overflow_leaves_captured_matrices_alone(kernel, simulated):
    replayed = kernel.Muon(parameters(), **SETTINGS)
    replayed.warmup(lambda *_: None)
    before = steps(replayed, 1)
    replayed.found_inf, replayed.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    count = simulated.replays
    replayed.step()
    assert simulated.replays > count
    assert all(map(torch.equal, (p for group in replayed.param_groups for p in group["params"]), before))


def test_batches_that_miss_a_gradient_are_eager(kernel, simulated):
    eager, replayed = (kernel.Muon(parameters(), **SETTINGS) for _ in range(2))
    replayed.warmup(lambda *_: None)
    whole = sum(1 for batch in replayed._plan.batches if all(m.parameter.number != 1 for m in batch.matrices))
    before = simulated.replays
    expected = steps(eager, 1, missing=(1,))
    assert all(map(torch.equal, steps(replayed, 1, missing=(1,)), expected))
    assert simulated.replays - before == whole


def test_another_eps_is_eager_until_the_next_warm_up(kernel, simulated):
    eager, replayed = (kernel.Muon(parameters(), **SETTINGS) for _ in range(2))
    replayed.warmup(lambda *_: None)
    for optimizer in (eager, replayed):
        for group in optimizer.param_groups:
            group["eps"] = 1e3  # which a gradient's norm is below
    before = simulated.replays
    assert all(map(torch.equal, steps(replayed), steps(eager)))
    assert simulated.replays == before
    replayed.warmup(lambda *_: None)
    before = simulated.replays
    assert all(map(torch.equal, steps(replayed), steps(eager)))
    assert simulated.replays > before


def test_norms_stay_what_they_were_after_other_replays(kernel, simulated):
    """Metrics are read later, perhaps after the next step has begun."""
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    optimizer.warmup(lambda *_: None)
    steps(optimizer, 1)
    kept = [update.norms for update in optimizer._norms]
    values = [norms.clone() for norms in kept]
    steps(optimizer, 1, seed=2)
    assert kept and all(map(torch.equal, kept, values))


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
        return lambda: [replay(), *map(spoil_one, work.args)]

    def spoil_one(value) -> None:
        if isinstance(value, Tensor) and value.ndim == 3:
            value.view(-1)[0] += 1.0

    monkeypatch.setattr(kernel.step.graphs, "captured", wrong)
    with pytest.warns(RuntimeWarning, match="other bits than eager launches"):
        optimizer.warmup(lambda *_: None)
    before = simulated.replays
    assert all(map(torch.equal, steps(optimizer), steps(kernel.Muon(parameters(), **SETTINGS))))
    assert simulated.replays == before


def test_what_cannot_be_captured_stays_eager_and_says_so(kernel, simulated, monkeypatch):
    def refuse(work, device, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(kernel.step.graphs, "captured", refuse)
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    with pytest.warns(RuntimeWarning, match="is launched eagerly: it cannot be captured .*not permitted"):
        optimizer.warmup(lambda *_: None)
    assert all(map(torch.equal, steps(optimizer), steps(kernel.Muon(parameters(), **SETTINGS))))


def test_graphs_can_be_switched_off_and_are_explained(kernel, simulated):
    off = kernel.Muon(parameters(), cuda_graphs=False, **SETTINGS)
    off.warmup(lambda *_: None)
    steps(off)
    assert simulated.captures == 0 and not any("CUDA graph" in note for note in off.explain().notes)
    on = kernel.Muon(parameters(), **SETTINGS)
    count = len(on._plan.batches)
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
    assert said and not any("capture" in what for what in said)


def test_cuda_graphs_must_be_a_flag(kernel):
    with pytest.raises(TypeError, match="cuda_graphs"):
        kernel.Muon(parameters(), cuda_graphs="yes")


def test_groups_of_other_settings_have_graphs_of_their_own(kernel, simulated):
    def grouped():
        rows = [(f"other.{name}", p) for name, p in parameters()[:3]]
        return [{"params": parameters()[:3]}, {"params": rows, "renormalize": "rows"}]

    eager, replayed = (kernel.Muon(grouped(), **SETTINGS) for _ in range(2))
    replayed.warmup(lambda *_: None)
    assert all(map(torch.equal, steps(replayed), steps(eager)))
    assert simulated.replays > simulated.captures
