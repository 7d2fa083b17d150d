"""Ours after a warm-up is a contestant beside ours as it is made, with graphs that are simulated on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import orthogonalizers, sweep_step
from benchmarks.built_kernel import load_built
from benchmarks.peers import MissingError
from benchmarks.shapes import TINY_MODEL
from benchmarks.step_rivals import ADAMW, OURS, WARMED_UP, find_rival, make_weights, step_of
from benchmarks.timing import Deadline
from tests.support.graphs_of_updates import FORBIDDEN, counted_graphs
from tools.pages.tables import sweep_tables

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def built(variant):
    """The kernel as the sweeps load it."""
    return load_built(variant.parent)[0]


@pytest.fixture
def graphs(built):
    with counted_graphs(built, "cpu") as counted:
        yield counted


def stepped(built, name: str) -> list[torch.Tensor]:
    """Return the matrices of a tiny model after two steps of a contestant."""
    weights = make_weights(TINY_MODEL, CPU)
    step = step_of(find_rival(name, built, CPU).build(weights))
    for _ in range(2):
        step()
    return weights.matrices


def orthogonalizer(built, name: str) -> orthogonalizers.Contestant:
    schedule = built.schedules.resolve_schedule("polar_express", orthogonalizers.STEPS)
    iteration = built.iteration.choose_iteration(CPU, torch.float32, (8, 12), schedule)
    return orthogonalizers.find_contestant(name, orthogonalizers.Task(built, CPU, iteration, schedule, "default"))


def test_without_graphs_they_need_a_gpu(built):
    with pytest.raises(MissingError, match=r"^needs a GPU$"):
        find_rival(WARMED_UP, built, CPU)
    with pytest.raises(MissingError, match=r"^needs a GPU$"):
        orthogonalizer(built, orthogonalizers.REPLAYED)


def test_a_warmed_up_contestant_replays_the_same_steps_and_measures_nothing(built, graphs, monkeypatch):
    """A measurement would change the kernels of ours in the middle of a sweep."""
    monkeypatch.setattr(built.tuning.tune, "contest_of", lambda task: pytest.fail("measured in a sweep"))
    expected = stepped(built, OURS)
    assert graphs.captures == 0
    assert all(map(torch.equal, stepped(built, WARMED_UP), expected))
    assert graphs.replays > graphs.captures > 0


def test_a_contestant_with_a_batch_that_is_launched_eagerly_is_refused(built, graphs, monkeypatch):
    """Else the time of a step that replays would be that of one that does not."""

    def refuse_the_second(work, device, pool):
        if graphs.captures == 1:
            raise RuntimeError(FORBIDDEN)
        return graphs.captured(work, device, pool)

    monkeypatch.setattr(built.step.graphs, "captured", refuse_the_second)
    rival = find_rival(WARMED_UP, built, CPU)
    with (
        pytest.warns(RuntimeWarning, match="is launched eagerly"),
        pytest.raises(RuntimeError, match=r"^\d+ of \d+ batches replay a CUDA graph"),
    ):
        rival.build(make_weights(TINY_MODEL, CPU))


def test_a_step_sweep_compares_all_with_both_of_ours(built, graphs):
    bench = sweep_step.Bench(built, CPU, (OURS, WARMED_UP, ADAMW), 3, 64)
    row = {"case": "tiny", "status": "measured", **sweep_step.measure(TINY_MODEL, bench, Deadline(), {})}
    outcomes = row["contestants"]
    assert outcomes[OURS]["ratio"] == outcomes[WARMED_UP]["ratio_to_warmed_up"] == [1, 1, 1]
    assert outcomes[WARMED_UP]["error"] == outcomes[OURS]["error"]
    assert outcomes[ADAMW]["ratio"] != outcomes[ADAMW]["ratio_to_warmed_up"]
    first, second, pieces = sweep_tables({"results": [row]}, "step")
    assert first.headings[-2:] == (f"{WARMED_UP} / ours", f"{ADAMW} / ours")
    assert second.headings == ("case", *(f"{name} / warmed up" for name in (OURS, WARMED_UP, ADAMW)))
    assert second.rows[0][2] == "1.00 (1.00-1.00)"
    assert pieces.headings[:2] == ("case", "ms") and pieces.headings[-1] == "rest"
    assert float(pieces.rows[0][1]) == pytest.approx(sum(map(float, pieces.rows[0][2:])), rel=1e-2)


def test_all_contestants_of_a_step_move_the_same_parameters(built, graphs, monkeypatch):
    """Of Llama 3.2 1B these are 10 GB: as many for each of nine contestants would not fit into a GPU of 80 GB."""
    made, make = [], sweep_step.make_weights

    def noted(parameters, device):
        made.append(parameters)
        return make(parameters, device)

    monkeypatch.setattr(sweep_step, "make_weights", noted)
    bench = sweep_step.Bench(built, CPU, (OURS, WARMED_UP, ADAMW), 3, 64)
    sweep_step.measure(TINY_MODEL, bench, Deadline(), {})
    assert made.count(TINY_MODEL) == 1


def test_a_replayed_orthogonalization_is_that_of_ours_for_each_input(built, graphs):
    ours, replayed = (orthogonalizer(built, name).run for name in orthogonalizers.OWN)
    for G in (torch.randn(3, 8, 12), torch.randn(1, 8, 12)):
        for _ in range(2):
            assert torch.equal(replayed(G), ours(G))
            G.normal_()
