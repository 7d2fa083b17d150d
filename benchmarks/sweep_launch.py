"""Time what a launch of the symmetric product costs the host, without a GPU: Triton's launcher over a stubbed driver.

    python -m benchmarks.sweep_launch [--build DIR] [--rounds N] [--output FILE] [--tiny]

Each row is one kind of product in a step, as the package calls it: making the result and starting the kernel. It
includes everything that the host does, except the driver's own part, and with the CPU's allocator instead of a GPU's.
For comparison there is `kernel[grid]`: the package chooses a configuration and Triton works out what to launch, as at
the first launch with operands of a new layout. Rows take turns round by round; times are quartiles. The target is
TARGET microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from benchmarks.built_kernel import find_variant, load_variant
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.stubbed_driver import stubbed_gpu
from benchmarks.terminal import print_results
from benchmarks.timing import processor_seconds, quartiles
from tools.lint.compiled import kernel_module

ROOT = Path(__file__).resolve().parent.parent
GPU = "sm_90"
TARGET = 10.0
# What rows are called whose kernel is started by Triton's launcher, after a search for its configuration.
SEARCHED = "kernel[grid]"
ROUNDS, CALLS = 31, 500
TINY_ROUNDS, TINY_CALLS = 3, 5
# Small, so that the CPU's allocator, like a GPU's, has free memory at hand. A launch does not depend on sizes.
BATCH, M, K = 2, 128, 256


def operands() -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Return A, B, D of each kind of product."""
    X, R = (torch.empty(BATCH, M, n, dtype=torch.float16) for n in (K, M))
    return {"X Xᵀ": (X, X.mT, None), "b A + c A²": (R, R, R), "A B": (R, torch.empty_like(R), None)}


def works(module: ModuleType, calls: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each row's name and a function that makes `calls` of its products."""

    def searched(A: Tensor, B: Tensor, D: Tensor | None) -> None:
        C = A.new_empty(BATCH, M, M)
        module.launch_symmetric_gemm(A, B, D, C, (1.5, -0.5, 0.0), module.chosen_for(A, B, D, C))

    def repeated(product: Callable[..., object], *arguments: object) -> None:
        for _ in range(calls):
            product(*arguments)

    for name, (A, B, D) in operands().items():
        yield name, partial(repeated, module.symmetric_product, A, B, D, 1.5, -0.5)
        yield f"{name}, {SEARCHED}", partial(repeated, searched, A, B, D)


def measure(package: Path, rounds: int, calls: int) -> dict[str, dict]:
    """Return the microseconds of a call of each row. RuntimeError if any call was not exactly one launch."""
    with stubbed_gpu(GPU, package) as driver:
        module = kernel_module(package, "gpu.launch_cache")
        with mock.patch.object(module, "can_launch_on", lambda A: type(A) is Tensor and A.is_cpu):
            rows = dict(works(module, calls))
            for work in rows.values():  # the first call compiles
                work()
            before = driver.launches_so_far()
            seconds = [{name: processor_seconds(work) for name, work in rows.items()} for _ in range(rounds)]
            launched = driver.launches_so_far() - before
    if launched != rounds * len(rows) * calls:
        raise RuntimeError(f"{rounds * len(rows) * calls} calls must launch as often, got {launched} launches")
    times = {name: quartiles([1e6 * of_round[name] / calls for of_round in seconds]) for name in rows}
    return {
        name: {"microseconds": list(microseconds), "target_microseconds": TARGET}
        for name, microseconds in times.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time what a launch costs the host.")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants; build/")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results, none if tiny")
    parser.add_argument("--tiny", action="store_true", help="few calls, to see that it runs")
    options = parser.parse_args(arguments)
    rounds, calls = (TINY_ROUNDS, TINY_CALLS) if options.tiny else (options.rounds, CALLS)
    kernel = load_variant(find_variant(options.build))
    path = options.output or (None if options.tiny else default_path("launch", torch.device("cpu")))
    torch.set_num_threads(1)
    settings = {"gpu": GPU, "shape": [BATCH, M, K], "rounds": rounds, "calls": calls}
    names = [row for name in operands() for row in (name, f"{name}, {SEARCHED}")]
    results = ResultFile(path, facts(kernel, torch.device("cpu"), settings), names)
    for name, row in measure(Path(kernel.__file__).parent, rounds, calls).items():
        results.put(name, row)
    print_results(list(results.rows.values()))


if __name__ == "__main__":
    main()
