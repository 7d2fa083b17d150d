"""What a warm-up measures on a device is used there, explained, and known to the next process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn import Parameter

from tests.support.rank_pool import load_kernel
from tests.support.triton_gpu import skip_without_triton

# On a GPU a measurement compiles a dozen kernels, perhaps beside other tests that do so.
BUDGETS = {"cpu": 20, "cuda": 200}
# A square size needs one measurement, which no budget ends.
SIDES = {"cpu": 32, "cuda": 256}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, kernel):
    """Each device that is there and has products to choose from, which on a GPU are torch's and Triton's."""
    skip_without_triton(kernel, request.param)
    return request.param


class WarmedUp(NamedTuple):
    """What a warm-up said, stage by stage, and what `explain()` says after it of the kernel and of everything."""

    stages: list[str]
    kernel: str
    notes: list[str]

    @property
    def summary(self) -> str | None:
        """What was said of all measurements; None if there were none."""
        return next((said for said in self.stages if said.startswith("measured ")), None)


def warm_up(kernel, place: str) -> WarmedUp:
    """Warm up an optimizer of one matrix; its products are in a half precision, which has several candidates."""
    matrix = Parameter(torch.ones(SIDES[place], SIDES[place], device=place))
    optimizer = kernel.Muon([("layers.0.weight", matrix)], ns_dtype="float16" if place == "cuda" else "bfloat16")
    stages: list[str] = []
    optimizer.warmup(lambda done, total, what: stages.append(what), budget=BUDGETS[place])
    explanation = optimizer.explain()
    return WarmedUp(stages, explanation.rows[0].kernel, list(explanation.notes))


def warm_up_elsewhere(variants: str, place: str) -> WarmedUp:
    """Warm up in a process that has measured nothing."""
    return warm_up(load_kernel(Path(variants)), place)


def files() -> list[Path]:
    return list(Path(os.environ["XDG_CACHE_HOME"]).glob("optimizer/*.json"))


def test_what_a_warm_up_has_measured_is_explained(kernel, measurements, place):
    report = warm_up(kernel, place)
    assert report.summary.startswith("measured 1 products: ")
    assert report.kernel.endswith(", measured here") and len(files()) == 1
    graphs = [note for note in report.notes if "CUDA graph" in note]
    assert graphs == (["1 of 1 batches replay a CUDA graph, captured by warmup()"] if place == "cuda" else [])


def test_a_warm_up_takes_what_tune_has_measured(kernel, measurements, place):
    said: list[str] = []
    shape, dtype = (SIDES[place],) * 2, torch.float16 if place == "cuda" else torch.bfloat16
    kernel.tune(
        [shape], device=place, dtype=dtype, budget=BUDGETS[place], progress=lambda *stage: said.append(stage[2])
    )
    assert said[-1].startswith("measured 1 products: ")
    report = warm_up(kernel, place)
    assert report.summary is None and report.kernel.endswith(", measured here")


def test_nothing_is_measured_twice_by_another_process(kernel, measurements, place):
    """Nor by this one after it has forgotten what it knew: both read the file."""
    first = warm_up(kernel, place)
    written = [file.read_bytes() for file in files()]
    measurements.forget()
    variants = str(Path(kernel.__file__).parents[1])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        others = [warm_up(kernel, place), pool.apply(warm_up_elsewhere, (variants, place))]
    for report in others:
        assert report.summary is None and (report.kernel, report.notes) == (first.kernel, first.notes)
    assert [file.read_bytes() for file in files()] == written


def test_explain_says_what_is_left_out_and_why(kernel, measurements):
    """Of the dtypes that the plan multiplies in."""
    table = measurements.Table({}, {("cpu_products", "bfloat16"): {"NATIVE": "wrong", "NATIVE_GRAM": "wrong"}})
    measurements.keep(kernel.kernels.speeds.machine.key_of(torch.device("cpu")), table)
    matrix = Parameter(torch.zeros(24, 40))
    notes = {dtype: kernel.Muon([matrix], ns_dtype=dtype).explain().notes for dtype in ("float32", "bfloat16")}
    line = "left out, since they failed on this machine: NATIVE, NATIVE_GRAM of cpu_products in bfloat16 (wrong)"
    assert line in notes["bfloat16"] and not any("left out" in note for note in notes["float32"])
