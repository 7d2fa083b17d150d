"""What the model predicts for whole orthogonalizations, and that the sweep prints it beside what it measures."""

from __future__ import annotations

from math import inf

import pytest
import torch

from benchmarks.fake_gpu import GPU, fake_gpu
from benchmarks.orthogonalize_cases import Case
from benchmarks.orthogonalizers import NAMES, OURS, STEPS, TORCH_PRODUCTS, Task
from benchmarks.predicted_factors import predicted_by_torch, predicted_factors
from benchmarks.predicted_step import GAP, pass_seconds
from benchmarks.result_file import UNMEASURED
from benchmarks.sweep_orthogonalize import predicted
from tools.pages.tables import sweep_tables

CUDA = torch.device("cuda", 0)
LONG = 8, 1024, 4096


@pytest.fixture
def gpu(kernel, monkeypatch):
    """Make `kernel` see an H200."""
    h200 = kernel.kernels.speeds.predictions.Gpu(*GPU)
    for module in (kernel.kernels.speeds.machine, kernel.polar.packing):
        monkeypatch.setattr(module, "gpu_of", lambda device: h200)
    return h200


def task_of(kernel, way: str, sides: tuple[int, int], work_dtype: torch.dtype = torch.float16) -> Task:
    """The task of a sweep in which products of `sides` are launched in one of `fake_gpu`'s ways."""
    schedule = kernel.schedules.resolve_schedule("polar_express", STEPS)
    with fake_gpu(kernel, way):
        iteration = kernel.iteration.choose_iteration(CUDA, work_dtype, sides, schedule)
    return Task(kernel, CUDA, iteration, schedule, "default")


def test_torchs_iteration_takes_its_products_and_gaps(kernel, gpu):
    """If passes took no time: a gap each for the norm's sums, root and division, and in each step for copy and sum."""
    batch, m, n = 1, 1024, 4096
    dense, iteration = kernel.kernels.speeds.predictions.dense_seconds, task_of(kernel, "torch", (m, n)).over_torch
    products = STEPS * sum(dense(gpu, batch, size) for size in ((m, m, n), (m, m, m), (m, n, m)))
    seconds = predicted_factors(kernel, iteration, (batch, m, n), CUDA, inf)
    assert seconds == pytest.approx(products + (3 + 2 * STEPS) * GAP)


@pytest.mark.parametrize("m, k", [(1024, 1024), (1024, 4096)])
def test_torchs_products_take_what_is_launched_beside_them(kernel, gpu, m, k):
    """For X Xᵀ nothing; for squares the copy of the addend, and the sum on the diagonal, in two bytes an element."""
    (batch, copied), products = (3, 3e12), kernel.kernels.speeds.predictions.dense_seconds(gpu, 3, (m, m, k))
    beside = pass_seconds(batch * 2 * 2 * (m * m + m), copied) + 2 * GAP if m == k else 0.0
    expected = (2 if m == k else 1) * products + beside
    assert predicted_by_torch(kernel, gpu, (batch, m, k), copied) == pytest.approx(expected)


def test_slower_copies_and_more_matrices_take_longer(kernel, gpu):
    iteration, (batch, *sides) = task_of(kernel, "symmetric", LONG[1:]).iteration, LONG
    base, slower = (predicted_factors(kernel, iteration, LONG, CUDA, copied) for copied in (4e12, 2e12))
    assert base < slower and base < predicted_factors(kernel, iteration, (2 * batch, *sides), CUDA, 4e12)


def test_tall_matrices_take_as_long_as_wide_ones(kernel, gpu):
    iteration, (batch, m, n) = task_of(kernel, "symmetric", LONG[1:]).iteration, LONG
    times = [predicted_factors(kernel, iteration, shape, CUDA, 4e12) for shape in ((batch, m, n), (batch, n, m))]
    assert times[0] == times[1]


def test_the_compiled_product_is_predicted_where_it_is_launched(kernel, gpu, monkeypatch):
    """Below the side from which on Triton's is known, too."""
    small = task_of(kernel, "symmetric", (256, 1024)).iteration, (64, 256, 1024)
    long = task_of(kernel, "symmetric", LONG[1:]).iteration, LONG
    triton = [predicted_factors(kernel, *each, CUDA, 4e12) for each in (small, long)]
    monkeypatch.setattr(kernel.kernels.gpu.tuned, "launches_hopper_gemm", lambda *size: True)
    compiled = [predicted_factors(kernel, *each, CUDA, 4e12) for each in (small, long)]
    assert triton[0] is None and compiled[0] > 0 and compiled[1] < triton[1]


def test_what_the_model_does_not_know_is_not_predicted(kernel, gpu, monkeypatch):
    iteration = task_of(kernel, "symmetric", LONG[1:]).iteration
    unknown = [iteration._replace(in_one_launch=True), iteration._replace(chain_dtype=torch.float32)]
    assert [predicted_factors(kernel, each, LONG, CUDA, 4e12) for each in unknown] == [None, None]
    for other in (gpu._replace(capability=100), None):
        monkeypatch.setattr(kernel.kernels.speeds.machine, "gpu_of", lambda device, other=other: other)
        assert predicted_factors(kernel, iteration, LONG, CUDA, 4e12) is None


def test_reports_print_what_is_predicted_beside_what_is_measured(kernel, gpu):
    """Ours and torch's in milliseconds; a row without predictions has none."""
    task, case = task_of(kernel, "symmetric", LONG[1:]), Case(("llama",), 8, *LONG)
    rows = [row_of(case, **predicted(case, task, copied)) for copied in (4e12, None)]
    table = next(sweep_tables({"results": rows}))
    cells = dict(zip(table.headings, zip(*table.rows)))
    assert table.headings.index("predicted ms") == table.headings.index("ms") + 1
    assert cells["predicted ms"] == (f"{rows[0]['predicted_milliseconds']:.4g}", "")
    assert cells["torch products predicted, ms"] == (f"{rows[0]['predicted_torch_milliseconds']:.4g}", "")
    assert "predicted ms" not in next(sweep_tables({"results": rows[1:]})).headings


def row_of(case: Case, **predictions: float | None) -> dict:
    """A row of the sweep as a GPU would give it, with made-up times."""
    outcome = {"error": 1e-3, "ratio": [1.0, 1.0, 1.0]}
    times = {"milliseconds": 2.0, "ideal_milliseconds": 1.0, "share_of_ideal": 0.5}
    contestants = {**dict.fromkeys(NAMES, UNMEASURED), OURS: outcome, TORCH_PRODUCTS: outcome}
    named = {"case": case.key, "status": "measured", "method": "gram"}
    return {**named, "contestants": contestants, **times, **predictions}
