"""The benchmarks of launches: Triton's own launcher runs, for one product and for a whole step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from benchmarks import sweep_launch, sweep_model_host
from benchmarks.shapes import MODELS

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, as Triton does"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a process that has no driver"),
]


def test_launch_sweep_times_every_product(variant, tmp_path, capsys):
    file = tmp_path / "launch.json"
    sweep_launch.main(["--tiny", "--build", str(variant.parent), "--output", str(file)])
    rows = json.loads(file.read_text())["results"]
    assert [row["case"] for row in rows[::2]] == list(sweep_launch.operands())
    assert all(0 < low <= middle <= high for low, middle, high in (row["microseconds"] for row in rows))
    assert "kernel[grid]" in capsys.readouterr().out


def test_launch_sweep_refuses_calls_that_launch_nothing(variant, monkeypatch):
    """A row that another path took would look fast."""
    work = {"nothing": lambda: None}
    monkeypatch.setattr(sweep_launch, "works", lambda module, calls: work.items())
    with pytest.raises(RuntimeError, match="must launch as often, got 0 launches"):
        sweep_launch.measure(variant, rounds=1, calls=1)


ASKED = """
import ctypes, sys
from benchmarks import stubbed_driver
ctypes.CDLL(sys.argv[1])  # as CUDA's runtime loads the driver
stubbed_driver.build()
"""


def test_a_process_that_has_a_driver_is_refused(repository, tmp_path):
    """Triton takes some functions of a driver by the name of its library, and so of the one that was there before."""
    library = tmp_path / "driver.so"
    subprocess.run(["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, "-x", "c", "/dev/null"], check=True)
    done = subprocess.run([sys.executable, "-c", ASKED, library], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 1 and "need a process that has not asked for a GPU" in done.stderr


def test_model_host_sweep_counts_what_a_gpu_would_batch(variant, tmp_path, capsys):
    """A tiny model's matrices of one shape make one batch each, as they would on a GPU."""
    file = tmp_path / "model-host.json"
    sweep_model_host.main(["--tiny", "--build", str(variant.parent), "--output", str(file)])
    rows = json.loads(file.read_text())["results"]
    matrices = [p for p in sweep_model_host.ONE_BLOCK if p.matrix]
    assert [row["case"] for row in rows] == ["tiny, replayed", "tiny, eager"]
    assert all(row["matrices"] == len(matrices) for row in rows)
    assert all(row["batches"] == len({sweep_model_host.shrunk(p) for p in matrices}) for row in rows)
    assert all(0 < low <= middle <= high for low, middle, high in (row["milliseconds"] for row in rows))


def test_batches_of_a_model_have_at_most_the_bytes_that_a_batch_may():
    lengths = sweep_model_host.batch_lengths(MODELS["llama-1b"], 2**29)
    up = next(p for p in MODELS["llama-1b"] if p.name.endswith("up_proj.weight"))
    assert lengths[sweep_model_host.shrunk(up)] == 2**29 // (4 * 8192 * 2048)
    for model in sweep_model_host.TARGETS:
        shapes = {p.rows_and_columns for p in MODELS[model] if p.matrix}
        assert len(sweep_model_host.batch_lengths(MODELS[model], 2**29)) == len(shapes)


def test_a_model_whose_shapes_are_confused_when_they_are_shrunk_is_refused():
    with pytest.raises(ValueError, match="20 shapes become 8 when their sides are divided by 256"):
        sweep_model_host.batch_lengths(MODELS["resnet-50"], 2**29)
