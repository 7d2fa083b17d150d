"""Write docs/predictions.md: how fast a model expects the symmetric product to be on GPUs that nobody has measured.

python -m tools.pages.predictions [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from benchmarks.predicted_step import by_cutlass
from tools.lint.compiled import PACKAGE, kernel_module
from tools.pages.generated import write_or_check
from tools.pages.markdown import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/predictions.md"

# Capability, multiprocessors and bytes of the second-level cache, from NVIDIA's data sheets and white papers.
GPUS = {
    "A100 80GB": (80, 108, 40 * 2**20),
    "H100 PCIe": (90, 114, 50 * 2**20),
    "H100 SXM, H200": (90, 132, 50 * 2**20),
}
COMPILED_FOR = 90
SIDES = (1024, 1280, 1536, 2048, 3072, 4096, 5120, 8192)
RATIOS = (1, 2, 4)
# Other batches of square matrices, which show that the choice does not depend on the batch.
SQUARES, BATCHES = (1024, 2048, 4096, 8192), (1, 7, 16)

INTRODUCTION = """\
# Predictions

This page shows which product a model chooses on a GPU that nobody has measured yet: torch's, or our symmetric kernel.
The choice holds until `warmup()` or `tune()` has measured the size on that GPU, or a file with measurements ships for
it. `explain()` says whether a model or a measurement decided. **No row of this page was measured.** The model, its
assumptions and their sources are in `torch-ext/optimizer/kernels/predictions.py`; `python -m tools.pages.predictions`
makes this page.

Each row is X Xᵀ of b matrices X (m, k) in half precision. The gain is torch's time divided by the kernel's. The ideal
is half of the product's FLOPs, since a symmetric result needs only half, at the rate that the device sustains. In most
rows b is the number of matrices that are worked on together; if the gain is {worth} or more there, the kernel is taken
for this m and k. The last rows of a table have 1, 7 or 16 matrices. The choice depends on the size alone, never on b,
so that a matrix has the same bits in every batch.

The symmetric kernel is Triton's. GPUs of compute capability 9.0 have one more column: the time of `hopper_gemm_`, which
is compiled with CUTLASS, by `benchmarks/predicted_step.py`, in the best number of sections. Only a measurement chooses
that product, never the model.
"""


def page(predictions: ModuleType) -> str:
    """Return the page, from the package's module."""
    sections = [INTRODUCTION.format(worth=predictions.WORTH)]
    for name, numbers in GPUS.items():
        rows = list(rows_of(predictions, predictions.Gpu(*numbers)))
        headings = ["b x m x k", "torch, µs", "symmetric, µs", "of the ideal", "gain", "taken"]
        if numbers[0] == COMPILED_FOR:
            headings.append("compiled, µs")
        sections.append(f"## {name}\n\n{table(headings, rows, numbers=True)}\n")
    return "\n".join(sections)


def rows_of(predictions: ModuleType, gpu) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each size on one GPU: as many matrices as are worked on together, then the counts BATCHES."""
    sizes = [(m, m * ratio) for m in SIDES for ratio in RATIOS]
    together = [(predictions.matrices_together(gpu, m, 2), m, k) for m, k in sizes]
    for batch, m, k in together + [(batch, m, m) for m in SQUARES for batch in BATCHES]:
        dense = predictions.dense_seconds(gpu, batch, (m, m, k))
        symmetric = predictions.symmetric_seconds(gpu, batch, m, k)
        ideal = batch * m * m * k / (gpu.multiprocessors * predictions.RATES[gpu.capability].sustained)
        taken = "symmetric" if predictions.predicted_gain(gpu, m, k) >= predictions.WORTH else "torch"
        times = f"{1e6 * dense:.1f}", f"{1e6 * symmetric:.1f}", f"{ideal / symmetric:.0%}"
        row = f"{batch} x {m} x {k}", *times, f"{dense / symmetric:.2f}", taken
        compiled = [by_cutlass(predictions, gpu, batch, m, k)] if gpu.capability == COMPILED_FOR else []
        yield *row, *(f"{1e6 * seconds:.1f}" for seconds in compiled)


if __name__ == "__main__":
    made = page(kernel_module(PACKAGE, "predictions"))
    sys.exit(write_or_check(PAGE, made, "Make docs/predictions.md from the package's model of products."))
