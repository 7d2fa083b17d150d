"""Write docs/predictions.md: how fast a model expects the symmetric product to be, and what it chooses on each GPU.

python -m tools.pages.predictions [--check]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from benchmarks.fake_gpu import GPU
from benchmarks.predicted_step import ADAMW_BYTES, PREDICTED, REACHED, by_cutlass, pass_seconds
from benchmarks.shapes import MODELS, matrix_counts
from tools.lint.compiled import PACKAGE, kernel_module
from tools.pages.generated import newest, write_or_check
from tools.pages.markdown import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/predictions.md"
RESULTS = ROOT / "benchmarks/results"

# Capability, multiprocessors and bytes of the second-level cache, from NVIDIA's data sheets and white papers.
GPUS = {
    "A100 80GB": (80, 108, 40 * 2**20),
    "H100 PCIe": (90, 114, 50 * 2**20),
    "H100 SXM, H200": GPU,
}
COMPILED_FOR = 90
SIDES = (1024, 1280, 1536, 2048, 3072, 4096, 5120, 8192)
RATIOS = (1, 2, 4)
# Other batches of square matrices, which show that the choice does not depend on the batch.
SQUARES, BATCHES = (1024, 2048, 3072, 4096, 5120, 8192), (1, 7, 16)
NAMED = "gpt2-124m", "moe-64", "llama-1b", "llama-8b"

INTRODUCTION = """\
# Predictions

This page shows which product a model chooses on a GPU for which no measurement ships: torch's, or our symmetric kernel.
The choice holds until `warmup()` or `tune()` has measured the size on that GPU, or a file with measurements ships for
it. `explain()` says whether a model or a measurement decided. **No figure on this page was measured.** For some of its
rows [the results of an H200](performance.md#nvidia-h200-2026-11-27) show the measured time. The model, its
assumptions and their sources are in `torch-ext/optimizer/kernels/speeds/predictions.py`;
`python -m tools.pages.predictions` makes this page. On a GPU `make gpu-lab` first measures the assumptions, each beside
what the model says (`tools/lab/calibration.py`).

Each row is X Xᵀ of b matrices X (m, k) in half precision. The gain is torch's time divided by the kernel's. The ideal
is half of the product's FLOPs, since a symmetric result needs only half, at the rate that the device sustains. In most
rows b is the number of matrices whose m x m products are launched together. X Xᵀ of long matrices is launched for whole
batches, which may have more. The last rows of a GPU's first table have 1, 7 or 16 matrices; on a GPU
`python -m benchmarks.sweep_symmetric_gemm` times these, and prints the predictions beside the times.

The kernel is taken if the gain per matrix is at least {worth}, where torch and the kernel each multiply as many
matrices as suits it best. So the choice depends on m and k alone, never on b, and a matrix has the same bits in every
batch.

A second table has the sizes of four models (`benchmarks/shapes.py`), and the products of m x m matrices, k = m, which
the iteration makes of them. On GPUs of compute capability 9.0 b is the number that fills the compiled product's rounds
best; it is smaller if the model has fewer matrices of one shape. On 8.0, up to m = {cached}, it is the number for which
torch's product takes the least time per matrix. The model knows the compute capabilities 8.0 and 9.0 alone. On other
GPUs, and up to m = {small} on 9.0 and m = {usual} on 8.0, it predicts nothing, and torch's product is taken.

The symmetric kernel is Triton's. GPUs of compute capability 9.0 have one more column: the time of `hopper_gemm_`, which
is compiled with CUTLASS, by `benchmarks/predicted_step.py`, in the best number of sections. Only a measurement chooses
that product, never the model.
"""

STEPS = """\
## Whole steps

One step on a GPU like the H200, without the host's time. `python -m benchmarks.sweep_fake_step` counts the kernels of
a step and the bytes of its passes on fake tensors; [this file](../benchmarks/results/{name})
has the counts. `benchmarks/predicted_step.py` adds their times up. For each polynomial a I + b A + c A² torch copies
the addend first, and another kernel adds to the diagonal afterwards. Both are passes in the column of torch's products
here. The tables above and the choice leave them out. The goal is a sum: the time of fused AdamW for all parameters,
plus 1.2 times the ideal time of all products. Our passes and fused AdamW are taken to move bytes at the same rate,
{percent} % of what a copy reaches. Llama 8B also meets the goal that it would have if AdamW alone reached the whole
rate, {strict:.2f} ms. Up to m = {small} a step with symmetric products is predicted with the tiles of larger sizes.
`make gpu-lab` puts these predictions beside the time of a step that is replayed from a CUDA graph.

"""


def page(predictions: ModuleType) -> str:
    """Return the page, from the package's module and the newest counts of steps."""
    sides = {"cached": predictions.CACHED, "small": predictions.small_side(90), "usual": predictions.SMALL_SIDE}
    sections = [INTRODUCTION.format(worth=predictions.WORTH, **sides)]
    for name, numbers in GPUS.items():
        gpu = predictions.Gpu(*numbers)
        headings = ["b x m x k", "torch, µs", "symmetric, µs", "of the ideal", "gain", "taken"]
        if gpu.capability == COMPILED_FOR:
            headings.append("compiled, µs")
        for title, sizes in ((f"## {name}", usual_sizes), (f"### {name}: sizes of models", sizes_of_models)):
            rows = [row_of(predictions, gpu, size) for size in sizes(predictions, gpu)]
            sections.append(f"{title}\n\n{table(headings, rows, numbers=True)}\n")
    return "\n".join([*sections, steps(predictions)])


def usual_sizes(predictions: ModuleType, gpu) -> Iterator[tuple[int, int, int]]:
    """Yield (b, m, k): as many matrices of each size as are worked on together, then the counts BATCHES."""
    for m in SIDES:
        for ratio in RATIOS:
            most, gain = predictions.matrices_together(gpu, m, 2), predictions.predicted_gain(gpu, m, m)
            yield predictions.in_full_waves(gpu, m, most, gain >= predictions.WORTH), m, m * ratio
    for m in SQUARES:
        for batch in BATCHES:
            yield batch, m, m


def sizes_of_models(predictions: ModuleType, gpu) -> list[tuple[int, int, int]]:
    """Return (b, m, k) of each model's matrices, and of the m x m products that are made of them; none twice."""
    sizes = {}
    for name in NAMED:
        most: Counter[tuple[int, int]] = Counter()
        for shape, count in matrix_counts(MODELS[name]).items():
            m, n = sorted(shape)
            together = predictions.matrices_together(gpu, m, 2)
            if gpu.capability == COMPILED_FOR:
                together = predictions.in_whole_rounds(gpu, m, together)
            else:
                together = predictions.in_full_waves(gpu, m, together, symmetric=False)
            for k in (m, n):
                most[m, k] = max(most[m, k], min(count, together))
        sizes.update(dict.fromkeys((batch, m, k) for (m, k), batch in sorted(most.items())))
    return list(sizes)


def row_of(predictions: ModuleType, gpu, size: tuple[int, int, int]) -> tuple[str, ...]:
    """Return the cells of one size, (b, m, k), on one GPU."""
    batch, m, k = size
    dense, gain = predictions.dense_seconds(gpu, batch, (m, m, k)), predictions.predicted_gain(gpu, m, k)
    if gain is None:
        symmetric = "", "", "", "torch"
    else:
        seconds = predictions.symmetric_seconds(gpu, batch, m, k)
        ideal = batch * m * m * k / (gpu.multiprocessors * predictions.RATES[gpu.capability].sustained)
        taken = "symmetric" if gain >= predictions.WORTH else "torch"
        symmetric = micro(seconds), f"{ideal / seconds:.0%}", f"{dense / seconds:.2f}", taken
    compiled = [by_cutlass(predictions, gpu, size)] if gpu.capability == COMPILED_FOR else []
    return f"{batch} x {m} x {k}", micro(dense), *symmetric, *map(micro, compiled)


def micro(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def steps(predictions: ModuleType) -> str:
    """Return the section about whole steps, from the newest file of `benchmarks.sweep_fake_step`."""
    file = newest(RESULTS, "fake-step", "benchmarks.sweep_fake_step")
    rows = json.loads(file.read_text())["results"]
    strict = strict_goal(rows, "llama-8b")
    text = STEPS.format(name=file.name, percent=round(100 * REACHED), small=predictions.small_side(90), strict=strict)
    headings = ("model", *(f"{way}, ms" for way in PREDICTED), "goal, ms")
    return text + table(headings, list(step_rows(rows)), numbers=True) + "\n"


def strict_goal(rows: Iterable[dict], model: str) -> float:
    """Return the milliseconds of a model's goal if fused AdamW moved bytes as fast as a copy does."""
    goal = next(row["goal_milliseconds"] for row in rows if row["model"] == model)
    adamw = 1e3 * pass_seconds(ADAMW_BYTES * sum(p.elements for p in MODELS[model]))
    return goal - adamw * (1 - REACHED)


def step_rows(rows: Iterable[dict]) -> Iterator[tuple[str, ...]]:
    """Yield the predicted milliseconds of each model's step with each kind of product, and its goal."""
    cells = {(row["model"], row["way"]): row for row in rows}
    for model in dict.fromkeys(model for model, _ in cells):
        times = [cells[model, way]["predicted_milliseconds"] for way in PREDICTED]
        goal = cells[model, next(iter(PREDICTED))]["goal_milliseconds"]
        yield model, *(f"{time:.2f}" for time in (*times, goal))


if __name__ == "__main__":
    made = page(kernel_module(PACKAGE, "speeds.predictions"))
    sys.exit(write_or_check({PAGE: made}, "Make docs/predictions.md from the package's model of products."))
