"""Which graphs no step can use any more, and that these are dropped with a warning, on a device that simulates them."""

from __future__ import annotations

import warnings

import pytest

from tests.support.graphs_of_updates import SETTINGS, parameters, steps
from tests.support.inside import plan_of


@pytest.mark.parametrize("key, value", [("ns_steps", 7), ("eps", 1e-3)])
def test_graphs_that_fit_no_step_any_more_are_dropped_with_a_warning(kernel, simulated, key, value):
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    optimizer.warmup(lambda *_: None)
    count = len(plan_of(optimizer).batches)
    for group in optimizer.param_groups:
        group[key] = value
    with pytest.warns(RuntimeWarning, match=r"no longer fit what steps do.*until you call warmup\(\) again") as warned:
        steps(optimizer, 1)
    assert [warning.filename for warning in warned] == [steps.__code__.co_filename]
    assert not optimizer._graphs._replays
    optimizer.warmup(lambda *_: None)
    assert f"{count} of {count} batches replay a CUDA graph, captured by warmup()" in optimizer.explain().notes


def test_graphs_that_still_fit_are_kept(kernel, simulated):
    """Those of a group with its own eps, too."""
    params = parameters()
    optimizer = kernel.Muon([{"params": params[:3]}, {"params": params[3:], "eps": 1e-3}], **SETTINGS)
    optimizer.warmup(lambda *_: None)
    before, replays = dict(optimizer._graphs._replays), simulated.replays
    steps(optimizer, 1)
    assert simulated.replays - replays == len(plan_of(optimizer).batches)
    optimizer.param_groups[1]["ns_steps"] = 7
    with pytest.warns(RuntimeWarning, match="1 of the CUDA graphs"):
        steps(optimizer, 1)
    (kept,) = optimizer._graphs._replays.items()
    assert len(before) == 2 and kept in before.items()


@pytest.mark.parametrize("method", [{"ns_dtype": "float32"}, {"ns_dtype": "float16", "ns_method": "gram_float32"}])
def test_a_graph_is_not_replayed_after_torch_rounds_float32_in_another_way(kernel, simulated, monkeypatch, method):
    """As torch.set_float32_matmul_precision does: the graph has the kernels of before."""
    optimizer = kernel.Muon(parameters(), **SETTINGS, **method)
    optimizer.warmup(lambda *_: None)
    assert optimizer._graphs._replays
    for module in kernel.plan.plan, kernel.step.graphs:
        monkeypatch.setattr(module, "float32_roundoffs", lambda: (2.0**-11, 2.0**-24))
    before = simulated.replays
    with pytest.warns(RuntimeWarning, match="no longer fit"):
        steps(optimizer, 1)
    assert simulated.replays == before


def test_a_graph_without_float32_products_stays_however_torch_rounds_these(kernel, simulated, monkeypatch):
    optimizer = kernel.Muon(parameters(), **SETTINGS, ns_dtype="float16", ns_method="standard")
    optimizer.warmup(lambda *_: None)
    for module in kernel.plan.plan, kernel.step.graphs:
        monkeypatch.setattr(module, "float32_roundoffs", lambda: (2.0**-11, 2.0**-24))
    before = simulated.replays
    steps(optimizer, 1)
    assert simulated.replays - before == len(plan_of(optimizer).batches)


def test_a_warm_up_after_a_change_says_nothing_of_old_graphs(kernel, simulated):
    optimizer = kernel.Muon(parameters(), **SETTINGS)
    optimizer.warmup(lambda *_: None)
    for group in optimizer.param_groups:
        group["ns_steps"] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.warmup(lambda *_: None)
    assert optimizer._graphs._replays


def test_graphs_wait_for_parameters_that_are_frozen_for_a_while(kernel, simulated):
    """These keep their state, and their places in the batches."""
    params = parameters()
    optimizer = kernel.Muon(params, **SETTINGS)
    optimizer.warmup(lambda *_: None)
    before = dict(optimizer._graphs._replays)
    frozen = dict(params)[optimizer.param_groups[0]["param_names"][0]]
    for needed in (False, True):
        frozen.requires_grad_(needed)
        frozen.grad = None
        steps(optimizer, 1)
    assert optimizer._graphs._replays == before


def test_graphs_of_batches_that_grow_are_dropped_with_a_warning(kernel, simulated, monkeypatch):
    """A parameter that was frozen from the start joins the others of its shape."""
    monkeypatch.setattr(kernel.plan.batches, "_length", lambda *_: 100)  # processors differ in it
    params = parameters()
    params[0][1].requires_grad_(False)
    optimizer = kernel.Muon(params, **SETTINGS)
    optimizer.warmup(lambda *_: None)
    params[0][1].requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="no longer fit what steps do"):
        steps(optimizer, 1)
