"""What the lab measures of the model's assumptions, and puts beside them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from benchmarks.predicted_step import GAP
from tools.lab import calibration, environment
from tools.lab.items import FailedError, Lab


@pytest.fixture
def lab(kernel, tmp_path):
    return Lab(kernel, torch.device("cpu"), tmp_path, tmp_path, (), True)


@pytest.fixture
def hopper(kernel, monkeypatch):
    """The device is taken for an H200."""
    gpu = kernel.kernels.speeds.predictions.Gpu(90, 132, 50 * 2**20)
    monkeypatch.setattr(kernel.kernels.speeds.machine, "gpu_of", lambda device: gpu)
    return gpu


def test_each_calibration_measures_something(lab):
    pytest.importorskip("triton")
    calibrations = {item.key: item.run() for item in calibration.items(lab)}
    assert len(calibrations) == 5
    for key, value in calibrations.items():
        of_model = [x for name, x in value.items() if name.startswith(("predicted", "needed"))]
        measured = [x for name, x in value.items() if not name.startswith(("predicted", "needed"))]
        assert all(map(math.isfinite, measured)), (key, value)
        assert key == "passes in a graph" or of_model == [None] * len(of_model)


def test_what_the_model_says_stands_beside_it(lab, hopper, monkeypatch):
    """The numbers that the model is made of. An H100 copies less than an H200."""
    assert environment.copy(lab)["predicted_giga_bytes"] is None
    monkeypatch.setattr(environment, "device_name", lambda device: "NVIDIA H200")
    assert environment.copy(lab)["predicted_giga_bytes"] == pytest.approx(4300)
    model, rates = lab.kernel.kernels.speeds.predictions, lab.kernel.kernels.speeds.predictions.RATES[90]
    torchs = model.dense_seconds(hopper, 1, (64, 64, 64))
    assert environment.dense(lab, torch.float16)["predicted_tera_flops"] == pytest.approx(2 * 64**3 / torchs / 1e12)
    # A tile of 128 x 128 has 2 · 128² FLOP for each of the elements of k, of which it reads 2 · 128 of 2 bytes.
    assert calibration.needed_by_tiles(lab) == pytest.approx(132 * rates.sustained * rates.symmetric / 64 / 1e9)


def test_products_are_rated_by_the_flops_of_a_full_one(lab, hopper, monkeypatch):
    measurement = calibration.sweep_symmetric_gemm.Result("float16", (2, 8, 4), [], 1e-9, 0.1, 2e-9, 0.2, 4e-9, 8e-9)
    monkeypatch.setattr(calibration.sweep_symmetric_gemm, "measure", lambda *_: measurement)
    rates = calibration.product(lab, (2, 8, 4))
    flops = 2 * 2 * 8 * 8 * 4
    names = "tera_flops", "torch_tera_flops", "predicted_tera_flops", "predicted_torch_tera_flops"
    assert [rates[name] for name in names] == pytest.approx([flops / 1e3 / each for each in (1, 2, 4, 8)])


def test_a_wrong_product_is_named(lab, monkeypatch):
    pytest.importorskip("triton")
    module, right = lab.kernel.kernels.gpu.symmetric_gemm, lab.kernel.kernels.gpu.symmetric_gemm.symmetric_gemm

    def wrong(*operands, out=None):
        C = right(*operands, out=out)
        C[:, 0, -1] += 1
        return C

    monkeypatch.setattr(module, "symmetric_gemm", wrong)
    with pytest.raises(FailedError, match="not symmetric"):
        calibration.product(lab, (1, 32, 32))


def test_sums_of_a_dominant_row_reach_the_end_of_the_range(lab, monkeypatch):
    """Parts may come as near to float16's largest number as the folded scale lets them; a sum beyond it fails."""
    products = lab.kernel.kernels.products
    sums = calibration.dominant_row(lab, 128)
    assert 0.95 * 65504 < sums["largest_part"] < 65504
    table = products.BATCHED._replace(gram_affine=lambda A, b, c, a: c * (A @ A * 1.1) + b * A)
    monkeypatch.setattr(products, "BATCHED", table)
    with pytest.raises(FailedError, match="float16's range"):  # as A A is rounded before it is multiplied by c
        calibration.dominant_row(lab, 128)


def test_rate_and_gap_are_told_apart(lab, monkeypatch):
    """By two sizes of passes, each of which takes a gap and the time of its bytes."""
    large = calibration.CPU_CACHE // 4
    seconds = [calibration.PASSES * (3e-6 + moved / 5e12) for moved in (large / calibration.TIMES, large)]
    monkeypatch.setattr(calibration, "take_turns", lambda *_: [(each, 0.0) for each in seconds])
    rates = calibration.passes(lab)
    assert rates["giga_bytes"] == pytest.approx(5000) and rates["gap_microseconds"] == pytest.approx(3)
    assert rates["predicted_gap_microseconds"] == 1e6 * GAP and rates["needed_by_tiles_giga_bytes"] is None
    monkeypatch.setattr(calibration, "take_turns", lambda *_: [(1.0, 0.0), (1.0, 0.0)])
    with pytest.raises(FailedError, match="more bytes took no more time"):
        calibration.passes(lab)


def test_a_launch_is_timed_without_its_compilation(lab, monkeypatch):
    """Three calls of the first burst, of which one compiles, then the median of two bursts: of 4 and of 2 seconds."""
    now, took = [0.0], itertools.chain([100.0, 2.0, 2.0, 4.0, 4.0, 4.0], itertools.repeat(2.0))
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])
    assert calibration.host_seconds(lambda: now.append(now.pop() + next(took)), 3, lab) == 3.0
