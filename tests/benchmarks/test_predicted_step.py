"""What the model of the compiled product and of a step must say, whatever its rates are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.fake_gpu import GPU
from benchmarks.predicted_step import (
    GAP,
    PAIRS,
    PREDICTED,
    SECTIONS,
    by_cutlass,
    goal_seconds,
    in_sections,
    predicted_step,
)
from benchmarks.shapes import TINY_MODEL, Parameter
from tools.lab import step_ways
from tools.lab.records import Record, Records, append
from tools.lab.tune import predicted_times

# What the lab has recorded on a GPU that copies more slowly than the model's.
COPY = Record("environment", "copy", "ok", 1.0, value={"giga_bytes": 3e3})


@pytest.fixture
def model(kernel):
    predictions = kernel.kernels.speeds.predictions
    return predictions, predictions.Gpu(*GPU)


def test_its_numbers_are_those_of_the_kernel(kernel):
    assert [config.sections for config in kernel.kernels.gpu.tuned.COMPILED] == list(SECTIONS)
    assert kernel.kernels.gpu.hopper_gemm.PAIRS == PAIRS


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
    assert min(times) > batch * m**3 / rate and by_cutlass(predictions, gpu, (batch, m, m)) == min(times)


def test_few_squares_that_are_left_are_worth_cutting(model):
    """Of 136 squares four are left after two rounds: cut, they take a part of a third one."""
    predictions, gpu = model
    whole, three, five = (in_sections(predictions, gpu, (1, 4096, 16384), sections) for sections in SECTIONS)
    assert five < three < whole


def lab_in(folder: Path, kernel, *records: Record) -> SimpleNamespace:
    """The lab with these records in its folder."""
    file = Records(folder, {"device": "a GPU"}).file
    for record in records:
        append(file, record)
    return SimpleNamespace(kernel=kernel, device=None, out=folder)


def test_the_lab_predicts_the_product_that_has_won(kernel, model, monkeypatch, tmp_path):
    """As `gpu_contest` times square matrices, by two products."""
    (predictions, gpu), tuned = model, kernel.kernels.gpu.tuned
    monkeypatch.setattr(kernel.kernels.speeds.machine, "gpu_of", lambda device: gpu)
    lab = lab_in(tmp_path, kernel, COPY)
    task = SimpleNamespace(need=("symmetric_gemm", "float16", 4096, 4096), device=None)
    compiled, triton = (
        predicted_times(lab, task, {**config._asdict(), "count": 2}, 2)["predicted_seconds"]
        for config in (tuned.COMPILED[-1], tuned.Config(128, 64, 8, 8, 3))
    )
    assert compiled == 2 * in_sections(predictions, gpu, (2, 4096, 4096), 5, 3e12)
    assert compiled > 2 * in_sections(predictions, gpu, (2, 4096, 4096), 5)
    assert triton == 2 * predictions.symmetric_seconds(gpu, 2, 4096, 4096)


def test_the_goal_charges_adamw_what_a_prediction_charges_it(kernel):
    """A step without matrices is AdamW's: one kernel for all parameters, and one that counts the steps."""
    elements, kernels = 2**30, 2
    predicted = predicted_step(kernel, [Parameter("w", (elements,))], "torch")
    assert predicted == pytest.approx(goal_seconds(kernel, 0, elements) + kernels * GAP, rel=1e-6)


def test_more_matrices_take_longer_in_every_way(kernel):
    few, many = ([Parameter(f"{i}", (1024, 4096), True) for i in range(count)] for count in (2, 4))
    for way in PREDICTED:
        assert predicted_step(kernel, few, way) < predicted_step(kernel, many, way)


@pytest.mark.parametrize(
    "gpu, records, known",
    [
        (GPU, [COPY], True),
        (GPU, [], False),
        (GPU, [replace(COPY, status="failed", value=None)], False),
        ((90, 114, 50 * 2**20), [COPY], False),
        (None, [COPY], False),
    ],
)
def test_the_lab_predicts_steps_by_its_own_copy_on_a_gpu_like_the_models(
    kernel, monkeypatch, tmp_path, gpu, records, known
):
    """An H100 has the multiprocessors of an H200, but a slower memory."""
    hardware = None if gpu is None else kernel.kernels.speeds.predictions.Gpu(*gpu)
    monkeypatch.setattr(kernel.kernels.speeds.machine, "gpu_of", lambda device: hardware)
    predicted = step_ways.predicted_times(lab_in(tmp_path, kernel, *records), TINY_MODEL)
    expected = [1e3 * predicted_step(kernel, TINY_MODEL, way, 3e12) for way in PREDICTED]
    assert list(predicted.values()) == (expected if known else [None] * len(PREDICTED))
    assert all(time > 1e3 * predicted_step(kernel, TINY_MODEL, way) for way, time in zip(PREDICTED, expected))
