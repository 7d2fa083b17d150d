"""On a GPU that Triton does not support, what measures its kernels is skipped, and nothing fails for that."""

from __future__ import annotations

import pytest
import torch

from tests.lab.test_runner import stage
from tests.support.triton_gpu import UNSUPPORTED
from tools.lab import environment, measure, tune
from tools.lab.items import NotApplicableError
from tools.lab.prove import prove
from tools.lab.records import Records

OF_TRITON = {
    environment: ("product of 1 x 32 x 32", "product of 16 x 32 x 32", "launches"),
    tune: ("static check", "symmetric_gemm float16 32x48", "symmetric_gemm float16 32x32", "small_polar float16 16x24"),
    measure: ("symmetric_gemm",),
}

# Tests that launch Triton's kernels on a GPU, or measure them there.
LAUNCHING = (
    *(f"tests/kernels/test_symmetric_gemm{part}.py" for part in ("", "_laws")),
    *(f"tests/kernels/test_small_polar{part}.py" for part in ("", "_batches", "_laws")),
    "tests/kernels/test_tiles.py",
    "tests/muon/test_device.py::test_symmetric_products_err_at_most_twice_as_much",
    *(f"tests/muon/test_device.py::test_a_replayed_orthogonalization_has_the_eager_bits[{dtype}-symmetric_gemm-cuda]"
      for dtype in (torch.float16, torch.bfloat16)),
    "tests/tuning/test_warmup.py",
)  # fmt: skip
# The one GPU of a machine is of compute capability 7.5, as far as anybody looks.
PLUGIN = """
from types import SimpleNamespace
import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
facts = SimpleNamespace(major=7, minor=5, multi_processor_count=40, L2_cache_size=2**22)
torch.cuda.get_device_properties = lambda device: facts
"""


@pytest.mark.parametrize("stage", OF_TRITON, ids=lambda stage: stage.__name__)
def test_items_of_tritons_kernels_do_not_apply_without_it(lab, monkeypatch, stage):
    pytest.importorskip("triton")
    monkeypatch.setattr(lab.kernel.kernels.speeds.machine, "supports_triton", lambda device: False)
    items = {item.key: item for item in stage.items(lab)}
    for key in OF_TRITON[stage]:
        with pytest.raises(NotApplicableError, match="Triton does not support this GPU"):
            items[key].run()


@pytest.mark.slow
def test_laws_of_tritons_kernels_are_skipped_without_it(variant, tmp_path, monkeypatch):
    """Each has a record that says why."""
    pytest.importorskip("triton")
    (tmp_path / "old_gpu.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lab, records = stage(tmp_path / "lab", 300), Records(tmp_path / "lab", {"device": "of compute capability 7.5"})
    lab.order["variants"] = str(variant.parent)
    assert prove(lab, records, ("-p", "old_gpu", "-m", "gpu", *LAUNCHING)), lab.log.read_text()
    entries = records.of("prove")
    assert entries.pop("pytest").status == "ok"
    assert {(each.status, each.problem) for each in entries.values()} == {("skipped", f"Skipped: {UNSUPPORTED}")}
    assert all(any(key.startswith(prefix) for key in entries) for prefix in LAUNCHING)
