"""Steps that replay graphs have the bits of eager ones: on a GPU, and simulated on the CPU.

What graphs share, and the memory that is free, is spoiled before each step. Gradients are new tensors in each step.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.graphs_of_updates import (
    SETTINGS,
    Graphs,
    counted_graphs,
    parameters,
    parameters_of,
    same_bits,
    steps,
)
from tests.support.inside import plan_of

BUDGET = 20
COUNT = 4


@pytest.fixture(scope="module", autouse=True)
def own_measurements(kernel, tmp_path_factory):
    """Measurements of this file alone: its first warm-ups make them, and the rest of a session does not see them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        kernel.kernels.speeds.measurements.forget()
        yield
    kernel.kernels.speeds.measurements.forget()


class Pair(NamedTuple):
    """An optimizer without graphs and one whose chains all have one, over equal parameters."""

    eager: Any
    replayed: Any
    graphs: Graphs

    @property
    def chains(self) -> int:
        return len(plan_of(self.replayed).chains())

    def compare(
        self, before: Callable[[Any, int], object] = lambda optimizer, step: None, left_out: int = 0, **options: Any
    ) -> None:
        """Take the same steps with both and compare all bits; `before` a step is called with each optimizer.

        All chains replay a graph in each step, but for so many that are `left_out` over all steps.
        """
        expected = steps(self.eager, COUNT, before=partial(before, self.eager), **options)

        def spoiled(step: int) -> None:
            before(self.replayed, step)
            self.graphs.spoil(self.replayed)

        count = self.graphs.replays
        tensors = steps(self.replayed, COUNT, before=spoiled, **options)
        assert self.graphs.replays - count == COUNT * self.chains - left_out
        assert same_bits(tensors, expected)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def graphs(request, kernel):
    with counted_graphs(kernel, request.param) as counted:
        yield counted


def pair(kernel: ModuleType, graphs: Graphs, dtype: torch.dtype = torch.float32, **settings: Any) -> Pair:
    """Return both optimizers, the second after a warm-up, which measures for both."""
    eager = kernel.Muon(parameters(graphs.place, dtype), cuda_graphs=False, **{**SETTINGS, **settings})
    replayed = kernel.Muon(parameters(graphs.place, dtype), **{**SETTINGS, **settings})
    replayed.warmup(lambda *_: None, budget=BUDGET)
    count = len(plan_of(replayed).chains())
    assert f"{count} of {count} batches replay a CUDA graph, captured by warmup()" in replayed.explain().notes
    assert not any("CUDA graph" in note for note in eager.explain().notes)
    return Pair(eager, replayed, graphs)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"release_grads": True},
        {"offload": True},
        {"offload": True, "release_grads": True},
        {"ns_dtype": "float16"},
        {"ns_dtype": "float32"},
        {"eps": 100.0},  # more than a norm
        {"decay_mode": "cautious", "equalize": "columns", "renormalize": "rows", "second_moment": "long_side"},
        {"equalize": "experimental_aurora", "experimental_hyperball": True},
        {"momentum_dtype": "int8"},
        {"fallback": "nadamw", "maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replayed_steps_have_the_bits_of_eager_ones(kernel, graphs, settings, dtype):
    pair(kernel, graphs, torch.float32 if "experimental_hyperball" in settings else dtype, **settings).compare()


@pytest.mark.parametrize(
    "settings", [{"master_weights": "split", "momentum_dtype": "float32"}, {"stochastic_rounding": True}], ids=str
)
def test_so_have_those_that_keep_more_than_bfloat16(kernel, graphs, settings):
    pair(kernel, graphs, torch.bfloat16, **settings).compare()


def test_rates_that_change_are_those_of_the_step(kernel, graphs):
    rates = 1e-2, 3e-2, 0.0, 2e-2

    def schedule(optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = rates[step], 0.9 + step / 100

    pair(kernel, graphs).compare(schedule)


def test_a_rate_in_a_tensor_is_that_of_the_step(kernel, graphs):
    def schedule(optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"].fill_(1e-2 / (step + 1))

    both = pair(kernel, graphs)
    for optimizer in both[:2]:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-2, device=graphs.place)
    both.compare(schedule)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_that_overflows_moves_nothing(kernel, graphs, capturable):
    """One entry of the second step's gradients is infinite. The steps after it are those of an eager optimizer.

    Where the optimizer may be captured, the step itself reads `found_inf`, after its replays; else the scaler skips it.
    """
    overflow, moved, both = 1, [], pair(kernel, graphs, capturable=capturable)
    scalers = {id(optimizer): torch.amp.GradScaler(graphs.place, init_scale=1024.0) for optimizer in both[:2]}
    for scaler in scalers.values():
        scaler.scale(torch.ones((), device=graphs.place))  # which makes its tensors

    def scale(optimizer, step: int) -> None:
        for p in parameters_of(optimizer):
            p.grad *= scalers[id(optimizer)].get_scale()
        if step == overflow:
            parameters_of(optimizer)[0].grad[0, 0] = torch.inf

    def take(optimizer) -> None:
        before = [p.detach().clone() for p in parameters_of(optimizer)]
        scaler = scalers[id(optimizer)]
        scaler.step(optimizer)
        scaler.update()
        moved.append(not same_bits(parameters_of(optimizer), before))

    both.compare(scale, left_out=0 if capturable else both.chains, take=take)
    assert moved == 2 * [step != overflow for step in range(COUNT)]
    assert all(scaler.get_scale() == 512.0 for scaler in scalers.values())


@pytest.mark.parametrize("settings", [{}, {"offload": True}, {"release_grads": True}], ids=str)
def test_a_batch_that_misses_a_gradient_is_eager_in_that_step(kernel, graphs, settings):
    both, number = pair(kernel, graphs, **settings), 1

    def lose(optimizer, step: int) -> None:
        if step == 1:
            parameters_of(optimizer)[number].grad = None

    chains = plan_of(both.replayed).chains()
    without = [any(m.parameter.number == number for batch in chain for m in batch.matrices) for chain in chains]
    both.compare(lose, left_out=sum(without))
    assert any(without) and not all(without)


def test_gradients_in_the_memory_of_the_step_before_are_those_of_the_step(kernel, graphs):
    """As with `zero_grad(set_to_none=False)`: addresses stay and values change."""
    kept: dict[int, list] = {}

    def reuse(optimizer, step: int) -> None:
        gradients = [p.grad for p in parameters_of(optimizer)]
        for memory, gradient in zip(kept.setdefault(id(optimizer), gradients), gradients):
            memory.copy_(gradient)
        for p, memory in zip(parameters_of(optimizer), kept[id(optimizer)]):
            p.grad = memory

    pair(kernel, graphs).compare(reuse)


def test_a_graph_that_is_not_kept_takes_nothing_from_the_next(kernel, graphs, monkeypatch):
    """The first one has other bits than eager launches, so nothing keeps torch from giving up its pool."""
    honest, count = kernel.step.graphs.captured, itertools.count()

    def captured(work, device, pool):
        start = honest(work, device, pool)
        return start if next(count) else lambda: (start(), work.args[0][0].factors.view(-1)[:1].add_(1.0))

    monkeypatch.setattr(kernel.step.graphs, "captured", captured)
    optimizer = kernel.Muon(parameters(graphs.place), **SETTINGS)
    with pytest.warns(RuntimeWarning, match="other bits than eager launches"):
        optimizer.warmup(lambda *_: None, budget=BUDGET)
    assert graphs.captures > 1 and len(optimizer._graphs._replays) == graphs.captures - 1


def test_another_eps_is_eager_until_the_next_warm_up(kernel, graphs):
    both = pair(kernel, graphs)
    for optimizer in both[:2]:
        for group in optimizer.param_groups:
            group["eps"] = 1e4  # which a gradient's norm is below
    both.compare(left_out=COUNT * both.chains)
    both.replayed.warmup(lambda *_: None, budget=BUDGET)
    both.compare()


def test_loaded_state_is_that_of_the_next_step(kernel, graphs):
    """Loading makes new momentum buffers: a graph that read the old ones would not see these."""
    both = pair(kernel, graphs)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in both[:2]]
    both.compare()
    for optimizer, state in zip(both[:2], states):
        optimizer.load_state_dict(state)
    both.compare(seed=2)


def test_norms_stay_what_they_were_after_other_replays(kernel, graphs):
    """Metrics are read later, perhaps after the next step has begun."""
    optimizer = pair(kernel, graphs).replayed
    steps(optimizer, 1)
    kept = [update.norms for update in optimizer._norms]
    values = [norms.clone() for norms in kept]
    graphs.spoil(optimizer)
    steps(optimizer, 1, seed=2)
    assert kept and same_bits(kept, values) and all(norms.isfinite().all() for norms in kept)


def test_the_warm_up_and_steps_of_another_optimizer_change_nothing(kernel, graphs):
    """They come between two steps, and its graphs are of the same kinds of batches."""
    both = pair(kernel, graphs)

    def interrupt(optimizer, step: int) -> None:
        if optimizer is both.replayed and step == 1:
            count = graphs.replays
            steps(pair(kernel, graphs).replayed, seed=7)
            graphs.replays = count

    both.compare(interrupt)
