"""Metrics of ranks beside those of one process."""

from __future__ import annotations

import math
from contextlib import nullcontext
from unittest import mock

import pytest
from torch import nn

from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    muon,
    one_thread,
    sharded,
    whole_gradient,
    whole_parameter,
)


def metrics_without_a_pass(kernel, case: Case):
    """Return the metrics of a step that fails if an owner takes norms of the updates that it has made."""
    with mock.patch.object(kernel.step.finish, "norms_of_updates", None):
        return metrics_of_step(kernel, case)


def metrics_of_step(kernel, case: Case, part=sharded):
    params = [part(whole_parameter(case, i), spec.layout) for i, spec in enumerate(case.specs)]
    optimizer = muon(kernel, case, params)
    for i, (spec, p) in enumerate(zip(case.specs, params)):
        p.grad = part(whole_gradient(case, 1, i), spec.layout).data
    optimizer.step()
    return {name: value.item() for name, value in optimizer.metrics().items()}


@pytest.mark.parametrize("spoiled", [None, 1])
@pytest.mark.parametrize("name", ["rows", "columns", "rows and columns", "strided rows"])
def test_metrics_of_ranks_add_up_to_those_of_one_process(kernel, pools, name, spoiled):
    layout = LAYOUTS[name]
    sizes = [(13, 7), (9, 30), (22, 22)]
    specs = tuple(Spec(f"layers.{i}.up.weight", size, layout) for i, size in enumerate(sizes))
    case = Case((*specs, Spec("tok_embeddings.weight", (30, 14), layout)), {"chunk_bytes": 400}, spoiled=spoiled)
    metrics = pools(4).run(metrics_of_step, case)
    with one_thread():
        alone = metrics_of_step(kernel, case, lambda value, layout: nn.Parameter(value))
    for key in ("matrices", "matrices_not_finite"):
        assert sum(share[key] for share in metrics) == alone[key]
    # In two orders of summation, of float32 norms; NaN where the whole is. Gradients' norms are those of the parts.
    for key in ("muon_update_norm", "muon_gradient_norm", "fallback_gradient_norm"):
        assert sum(share[key] ** 2 for share in metrics) ** 0.5 == pytest.approx(alone[key], rel=1e-6, nan_ok=True), key
    assert all(math.isfinite(share["muon_update_norm"]) for share in metrics if not share["matrices_not_finite"])


def test_an_owner_of_several_matrices_of_one_size_has_the_rms_of_all(kernel, pools):
    """Each owns two of eight, and the mean of squares over all ranks is that of one process."""
    specs = tuple(Spec(f"layers.{i}.up.weight", (12, 20), LAYOUTS["rows"]) for i in range(8))
    case = Case(specs, {"ns_dtype": "float32"})
    metrics = pools(4).run(metrics_of_step, case)
    with one_thread():
        alone = metrics_of_step(kernel, case, lambda value, layout: nn.Parameter(value))
    assert [share["matrices"] for share in metrics] == [2] * 4
    mean = sum(share["muon_update_rms"] ** 2 for share in metrics) / 4
    assert mean**0.5 == pytest.approx(alone["muon_update_rms"], rel=1e-6)  # of float32 norms, in two orders


def metrics_of_one_gradient(kernel, case: Case, part=sharded):
    """Return the metrics of a step in which only the first parameter has a gradient."""
    params = [part(whole_parameter(case, i), spec.layout) for i, spec in enumerate(case.specs)]
    optimizer = muon(kernel, case, params)
    params[0].grad = part(whole_gradient(case, 1, 0), case.specs[0].layout).data
    optimizer.step()
    return {name: value.item() for name, value in optimizer.metrics().items()}


@pytest.mark.parametrize("settings", [{}, {"sum_gram": True}], ids=["owners", "sums"])
def test_matrices_without_a_gradient_do_not_count(kernel, pools, settings):
    """An owner has one of each size, in two batches; or Gram matrices are summed, and each rank has a quarter."""
    sizes = [(4, 64)] * 4 + [(4, 60)] * 4
    specs = tuple(Spec(f"layers.{i}.up.weight", size, LAYOUTS["columns"]) for i, size in enumerate(sizes))
    case = Case(specs, {"ns_dtype": "float32", **settings})
    metrics = pools(4).run(metrics_of_one_gradient, case)
    with one_thread():
        alone = metrics_of_one_gradient(kernel, case, lambda value, layout: nn.Parameter(value))
    working = [each for each in metrics if each["matrices"]]
    assert alone["matrices"] == 1 and {each["matrices"] for each in working} == {1}
    assert all(each["muon_update_rms"] == 0 for each in metrics if not each["matrices"])
    of_all = sum(each["muon_update_rms"] ** 2 for each in working) / len(working)
    # In float32 the two methods differ by roundings, by far less than a matrix more or less.
    assert of_all**0.5 == pytest.approx(alone["muon_update_rms"], rel=1e-3)


def test_an_owner_takes_no_norms_that_hyperball_replaces(kernel, pools):
    specs = tuple(Spec(f"layers.{i}.up.weight", (24, 16), LAYOUTS["rows"]) for i in range(3))
    case = Case(specs, {"experimental_hyperball": True})
    metrics = pools(4).run(metrics_without_a_pass, case)
    with one_thread():
        alone = metrics_of_step(kernel, case, lambda value, layout: nn.Parameter(value))
    key = "muon_update_norm"
    assert sum(share[key] ** 2 for share in metrics) ** 0.5 == pytest.approx(alone[key], rel=1e-6) and alone[key] > 0


def metrics_of_batches_of_sums(kernel, case: Case, together: bool, metrics):
    """Return the metrics of a step that sums Gram matrices: of one matrix at a time, or of all, as on a GPU."""
    in_one = mock.patch.object(kernel.plan.gram_sums, "slices", lambda members, _: [members])
    with in_one if together else nullcontext():
        return metrics(kernel, case)


@pytest.mark.parametrize("metrics", [metrics_of_step, metrics_of_one_gradient])
@pytest.mark.parametrize("together", [False, True])
def test_metrics_of_sums_add_up_to_those_of_one_process(kernel, pools, together, metrics):
    """Up to rounding: float32 to 2**-24 in 15 products, amplified by up to about 2**8, in two ways."""
    specs = tuple(Spec(f"layers.{i}.up.weight", (6, 400), LAYOUTS["columns"]) for i in range(3))
    case = Case(specs, {"sum_gram": True, "ns_dtype": "float32"})
    shares = pools(4).run(metrics_of_batches_of_sums, case, together, metrics)
    with one_thread():
        alone = metrics(kernel, case, lambda value, layout: nn.Parameter(value))
    assert [share["matrices"] for share in shares] == [alone["matrices"]] * 4
    for key, parts in ("muon_update_norm", 1), ("muon_update_rms", 4):  # ranks have equal parts
        squares = sum(share[key] ** 2 for share in shares)
        assert (squares / parts) ** 0.5 == pytest.approx(alone[key], rel=2**-24 * 15 * 2**8 * 2), key
