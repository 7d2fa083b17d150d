"""A lab without a GPU."""

from __future__ import annotations

import pytest
import torch

from tools.lab.items import Lab
from tools.lab.records import Records


@pytest.fixture
def lab(kernel, variant, tmp_path, monkeypatch):
    """A lab without a GPU, over a package that knows nothing, reads what the lab writes, and launches a stand-in."""
    measurements, product = kernel.kernels.speeds.measurements, kernel.kernels.gpu.symmetric_gemm
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(measurements, "_CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(product, "launch_symmetric_gemm", StandIn(kernel))
    measurements.forget()
    measurements.shipped.cache_clear()
    Records(tmp_path, {})
    yield Lab(kernel, torch.device("cpu"), variant.parent, tmp_path, (tmp_path / "configs",), True)
    monkeypatch.undo()
    measurements.forget()
    measurements.shipped.cache_clear()


class StandIn:
    """A launch on the CPU; those with steps of `wrong` columns add one to an entry."""

    def __init__(self, kernel, wrong: int = 0):
        self.kernel, self.wrong = kernel, wrong

    def __call__(self, A, B, D, C, scalars, config):
        numbers = (torch.tensor(float(x)) for x in scalars)
        self.kernel.kernels.gpu.symmetric_gemm._on_cpu(A, B, D, C, *numbers)
        C[:, 0, -1] += config.tile_k == self.wrong
