"""On a GPU that Triton does not support, what measures its kernels is skipped, and nothing fails for that."""

from __future__ import annotations

import pytest

from tools.lab import environment, measure, tune
from tools.lab.items import NotApplicableError

OF_TRITON = {
    environment: ("product of 1 x 32 x 32", "product of 16 x 32 x 32", "launches"),
    tune: ("static check", "symmetric_gemm float16 32x48", "symmetric_gemm float16 32x32", "small_polar float16 16x24"),
    measure: ("symmetric_gemm",),
}


@pytest.mark.parametrize("stage", OF_TRITON, ids=lambda stage: stage.__name__)
def test_items_of_tritons_kernels_do_not_apply_without_it(lab, monkeypatch, stage):
    pytest.importorskip("triton")
    monkeypatch.setattr(lab.kernel.kernels.machine, "supports_triton", lambda device: False)
    items = {item.key: item for item in stage.items(lab)}
    for key in OF_TRITON[stage]:
        with pytest.raises(NotApplicableError, match="Triton does not support this GPU"):
            items[key].run()
