"""Count what a step launches on a GPU, moves and waits for, without one: kernels, bytes, and synchronizations.

    python -m benchmarks.sweep_fake_step [--build DIR] [--models NAME ...] [--output FILE]

Each model has a row for torch's products, for symmetric ones by Triton, for those compiled with CUTLASS, which get
matrices in whole rounds, and for CUDA graphs. Each replay of a graph counts as one launch, which writes its factors;
what is inside does not count. Copies count, also those that torch makes of the addends of its products. Counts are
exact except for what else libraries launch behind one operation. Bytes are those of all kernels, and those of passes
alone, without what products read and write. A pass that changes an element in place reads and writes it. A step must
never wait for the device; if one does, the exit status is 1.

Two columns are not counts: the time of the kernels by the package's model of products (`benchmarks.predicted_step`),
which the lab compares with measured steps, and the goal for that time: fused AdamW plus 1.2 times the ideal time of
symmetric products. Both assume that fused AdamW and our passes move bytes at the same rate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.built_kernel import load_built
from benchmarks.fake_gpu import GPU, WAYS, counted_step, fake_gpu, fake_optimizer
from benchmarks.predicted_step import PREDICTED, goal_seconds, predicted_seconds
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.shapes import MODELS, Parameter, matrix_counts
from benchmarks.terminal import print_results
from benchmarks.work import least_flop

ROOT = Path(__file__).resolve().parent.parent
USUAL = "gpt2-124m", "moe-64", "llama-1b", "llama-8b"


def measure(kernel, model: str, way: str) -> dict:
    """Return the row of a model whose products are launched in one of `WAYS`."""
    symmetric = PREDICTED.get(way)
    with fake_gpu(kernel, way):
        optimizer = fake_optimizer(kernel, MODELS[model])
        work = counted_step(optimizer)
        elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        goal = goal_seconds(kernel, least_flop_of(kernel, MODELS[model]), elements)
    return {
        "model": model,
        "way": way,
        "kernels": sum(work.kernels.values()),
        "bytes_an_element": work.bytes / elements,
        "pass_bytes_an_element": (work.bytes - work.bytes_of_products) / elements,
        "syncs": sum(work.syncs.values()),
        "predicted_milliseconds": None if symmetric is None else 1e3 * predicted_seconds(kernel, work, symmetric),
        "goal_milliseconds": 1e3 * goal,
        "most": dict(work.kernels.most_common(6)),
    }


def least_flop_of(kernel, parameters: Sequence[Parameter]) -> int:
    """Return the FLOP of the cheapest methods for all matrices of a model, with symmetric products."""
    schedule, gpu = kernel.schedules.resolve_schedule("polar_express", 5), torch.device("cuda", 0)
    sizes = {shape: tuple(sorted(shape)) for shape in matrix_counts(parameters)}
    least = {shape: least_flop(kernel, gpu, torch.float16, size, schedule) for shape, size in sizes.items()}
    return sum(count * least[shape] for shape, count in matrix_counts(parameters).items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count what a step launches on a GPU, without one.")
    parser.add_argument("--models", nargs="*", default=USUAL, choices=MODELS)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants; build/")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    options = parser.parse_args(arguments)
    kernel, _ = load_built(options.build)
    cases = {f"{model}, {way}": (model, way) for model in options.models for way in WAYS}
    settings = {"gpu": list(GPU), "device": "fake tensors"}
    path = options.output or default_path("fake-step", torch.device("cpu"))
    results = ResultFile(path, {**facts(kernel, torch.device("cpu"), {}), **settings}, list(cases))
    for name, case in cases.items():
        results.put(name, measure(kernel, *case))
    rows = list(results.rows.values())
    print_results(rows)
    return int(any(row["syncs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
