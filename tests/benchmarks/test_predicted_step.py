"""The model of the compiled product, which no GPU has run: what it must say whatever its rates are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.fake_gpu import GPU
from benchmarks.predicted_step import PAIRS, SECTIONS, by_cutlass, in_sections
from tools.lab.tune import predicted_times


@pytest.fixture
def model(kernel):
    predictions = kernel.kernels.predictions
    return predictions, predictions.Gpu(*GPU)


def test_its_numbers_are_those_of_the_kernel(kernel):
    assert [config.sections for config in kernel.kernels.tuned.COMPILED] == list(SECTIONS)
    assert kernel.kernels.hopper_gemm.PAIRS == PAIRS


@pytest.mark.parametrize("batch, m, rounds", [(22, 512, 1), (23, 512, 2), (11, 2048, 6), (2, 4096, 5), (1, 8192, 8)])
def test_without_sections_it_takes_whole_rounds(model, batch, m, rounds):
    """22 matrices of three squares are 66, one for each pair; 2 of 136 are four rounds and eight squares."""
    predictions, gpu = model
    once = predictions.DENSE_LAUNCH_SECONDS
    square = in_sections(predictions, gpu, (1, 256, m), 1) - once
    assert in_sections(predictions, gpu, (batch, m, m), 1) == pytest.approx(rounds * square + once)


@pytest.mark.parametrize("m", [768, 1024, 2048, 3072, 4096, 5120, 8192])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_nothing_is_faster_than_its_flops(model, batch, m):
    predictions, gpu = model
    times = [in_sections(predictions, gpu, (batch, m, m), sections) for sections in SECTIONS]
    rate = gpu.multiprocessors * predictions.RATES[gpu.capability].sustained
    assert min(times) > batch * m**3 / rate and by_cutlass(predictions, gpu, batch, m, m) == min(times)


def test_few_squares_that_are_left_are_worth_cutting(model):
    """Of 136 squares four are left after two rounds: cut, they take a part of a third one."""
    predictions, gpu = model
    whole, three, five = (in_sections(predictions, gpu, (1, 4096, 16384), sections) for sections in SECTIONS)
    assert five < three < whole


def test_the_lab_predicts_the_product_that_has_won(kernel, model, monkeypatch):
    """As `gpu_contest` times square matrices, by two products."""
    (predictions, gpu), tuned = model, kernel.kernels.tuned
    monkeypatch.setattr(kernel.kernels.machine, "gpu_of", lambda device: gpu)
    lab, task = (
        SimpleNamespace(kernel=kernel),
        SimpleNamespace(need=("symmetric_gemm", "float16", 4096, 4096), device=None),
    )
    compiled, triton = (
        predicted_times(lab, task, {**config._asdict(), "count": 2})["predicted_seconds"]
        for config in (tuned.COMPILED[-1], tuned.Config(128, 64, 8, 8, 3))
    )
    assert compiled == 2 * in_sections(predictions, gpu, (2, 4096, 4096), 5)
    assert triton == 2 * predictions.symmetric_seconds(gpu, 2, 4096, 4096)
