"""What the lab's page says is to be carried to the next machine is what a run needs there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tools.lab import __main__ as page
from tools.lab import tune


def carry(lab: Path, kept: Path) -> None:
    """Copy what the page lists from a lab's folder."""
    section = page.__doc__.partition("Between two runs, carry")[2].partition("Records stay valid")[0]
    for pattern in re.findall(r"^ {4}(\S+)", section, re.MULTILINE):
        for path in lab.glob(pattern):
            target = kept / path.relative_to(lab)
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target)


def test_a_candidate_that_lost_the_gpu_is_left_out_on_the_next_machine(lab, tmp_path_factory, monkeypatch):
    pytest.importorskip("triton")
    measurements, product = lab.kernel.kernels.speeds.measurements, lab.kernel.kernels.gpu.symmetric_gemm
    launch = product.launch_symmetric_gemm

    def lose(*arguments) -> None:
        if arguments[-1].tile_k == 64:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        launch(*arguments)

    monkeypatch.setattr(product, "launch_symmetric_gemm", lose)
    with pytest.raises(RuntimeError, match="start it again; it will leave this candidate out"):
        tune.tune_product(lab, torch.float16, (32, 48))
    kept = tmp_path_factory.mktemp("kept")
    carry(lab.out, kept)
    shutil.rmtree(lab.out)
    shutil.copytree(kept, lab.out)
    measurements.forget()
    assert tune.tune_product(lab, torch.float16, (32, 48))["tile_k"] == 32
