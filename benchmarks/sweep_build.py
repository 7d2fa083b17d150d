"""Build the compiled variants of this machine: how long compilers work, and how large the results are.

    python -m benchmarks.sweep_build [--backends NAME ...] [--output FILE]

A row for each backend: `cpu` and, where there is nvcc, `cuda`. Each is built once, from nothing, in a folder that is
deleted in the end. Seconds are processor time of all that a build starts, nearly all of it compilers; other work on the
machine hardly changes it, and on several cores a build is over sooner. Machine code for GPUs is what one kind of GPU
loads, uncompressed: `sm_90a` is the product for Hopper alone.
"""

from __future__ import annotations

import argparse
import re
import resource
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.built_kernel import load_variant
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.terminal import print_results
from tools.build.commands import run
from tools.build.recipe import read_build
from tools.build.variants import BACKENDS, build_variants, unavailable_backends
from tools.lint.binary import CUOBJDUMP

ROOT = Path(__file__).resolve().parent.parent
KIB = 1024


def compiler_seconds() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def machine_code(library: Path) -> dict[str, int]:
    """Return the KiB of machine code that a library has for each kind of GPU, such as `sm_90a`."""
    sizes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        run([CUOBJDUMP, "-xelf", "all", library.resolve()], cwd=Path(folder))
        for cubin in Path(folder).iterdir():
            sizes[re.search(r"\.(sm_\w+)\.cubin$", cubin.name)[1]] += cubin.stat().st_size
    return {gpu: round(size / KIB) for gpu, size in sizes.items()}


def measure(backend: str, folder: Path) -> tuple[Path, dict]:
    """Return the folder of a new variant in `folder`, and its row."""
    before = compiler_seconds()
    (built,) = build_variants(ROOT, [backend], folder)
    seconds = compiler_seconds() - before
    (library,) = built.path.glob("*.so")
    return built.path, {
        "compiler_seconds": seconds,
        "library_kib": round(library.stat().st_size / KIB),
        "variant_kib": round(built.size / KIB),
        "gpu_code_kib": machine_code(library) if backend == "cuda" else {},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    missing = unavailable_backends(read_build(ROOT), None)
    parser = argparse.ArgumentParser(description="Build variants: how long that takes, and their sizes.")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=[b for b in BACKENDS if b not in missing])
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results")
    options = parser.parse_args(arguments)
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        measured = {backend: measure(backend, Path(folder)) for backend in options.backends}
        # Before the file is opened, which may have results of another commit: only a build tells its own.
        print_results([{"case": backend, "status": "measured", **row} for backend, (_, row) in measured.items()])
        kernel = load_variant(next(iter(measured.values()))[0])
        results = ResultFile(options.output or default_path("build", cpu), facts(kernel, cpu, {}), list(measured))
        for backend, (_, row) in measured.items():
            results.put(backend, row)


if __name__ == "__main__":
    main()
