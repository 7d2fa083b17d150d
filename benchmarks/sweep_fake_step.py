"""Count what a step launches on a GPU, moves and waits for, without one: kernels, bytes, and synchronizations.

    python -m benchmarks.sweep_fake_step [--models NAME ...] [--output FILE]

Each model has a row for torch's products, for the symmetric kernel, and for CUDA graphs, of which each replay counts as
one launch and its inside not at all, bytes included. Counts are exact but for what libraries launch behind one
operation. A step waits for the device not once; the status is 1 where one does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.built_kernel import load_built
from benchmarks.fake_gpu import L2_BYTES, WAYS, counted_step, fake_gpu, fake_optimizer
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.shapes import MODELS

ROOT = Path(__file__).resolve().parent.parent
USUAL = "gpt2-124m", "moe-64", "llama-1b", "llama-8b"


def measure(kernel, model: str, way: str) -> dict:
    """Return the row of a model whose products are launched in one of `WAYS`."""
    with fake_gpu(kernel, way):
        optimizer = fake_optimizer(kernel, MODELS[model])
        work = counted_step(optimizer)
        elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return {
        "model": model,
        "way": way,
        "kernels": sum(work.kernels.values()),
        "bytes_an_element": work.bytes / elements,
        "syncs": sum(work.syncs.values()),
        "most": dict(work.kernels.most_common(6)),
    }


def report(rows: Sequence[Mapping]) -> Table:
    table = Table("model", "products", title="One step on a GPU that is not there")
    for heading in "kernels", "bytes an element", "waits for the device":
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"], row["way"], str(row["kernels"]), f"{row['bytes_an_element']:.0f}", str(row["syncs"])
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count what a step launches on a GPU, without one.")
    parser.add_argument("--models", nargs="*", default=USUAL, choices=MODELS)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants; build/")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    options = parser.parse_args(arguments)
    kernel, _ = load_built(options.build)
    cases = {f"{model}, {way}": (model, way) for model in options.models for way in WAYS}
    settings = {"l2_bytes": L2_BYTES, "device": "fake tensors"}
    path = options.output or default_path("fake-step", torch.device("cpu"))
    results = ResultFile(path, {**facts(kernel, torch.device("cpu"), {}), **settings}, list(cases))
    for name, case in cases.items():
        results.put(name, measure(kernel, *case))
    rows = list(results.rows.values())
    Console(width=None if Console().is_terminal else 100).print(report(rows))
    return int(any(row["syncs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
