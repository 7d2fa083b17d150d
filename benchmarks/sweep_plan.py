"""Measure time and memory of the plan of a large model on many ranks. Nothing is sent and no state is made.

    python -m benchmarks.sweep_plan [--build DIR] [--tiny] [--rounds N] [--output FILE]

The construction of the optimizer is timed, of which the plan is nearly all. Every round is a separate process, whose
memory nothing else has used. Seconds are processor time, the median of the rounds. Megabytes are the growth of the
process's peak memory, the largest of the rounds (Linux).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.built_kernel import load_built
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.terminal import print_results

ROOT = Path(__file__).resolve().parent.parent
TARGET_SECONDS, TARGET_MEGABYTES = 2.0, 200.0

# The shapes of a Llama with 7e9 parameters, in turn.
SHAPES = [(4096, 4096), (1024, 4096), (11008, 4096), (4096, 11008)]


class Case(NamedTuple):
    """A model with a number of matrices, on ranks that have a number of copies of it, each cut into rows."""

    ranks: int
    copies: int
    parameters: int

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters on {self.copies} x {self.ranks // self.copies:,} ranks"


CASES = [Case(4096, 1, 10_000), Case(4096, 16, 10_000)]
TINY_CASES = [Case(8, 2, 12)]


def sharded_parameters(case: Case) -> list[tuple[str, torch.nn.Parameter]]:
    """Join a group of `case.ranks` that sends nothing, and return the model's parameters, without memory."""
    dist.init_process_group("fake", rank=case.ranks // 3, world_size=case.ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (case.copies, case.ranks // case.copies))
    shapes = (SHAPES[i % len(SHAPES)] for i in range(case.parameters))
    return [(f"layers.{i}.up.weight", sharded_parameter(mesh, shape)) for i, shape in enumerate(shapes)]


def sharded_parameter(mesh: DeviceMesh, shape: tuple[int, int]) -> torch.nn.Parameter:
    rows = -(-shape[0] // mesh.shape[1])
    left = shape[0] - rows * mesh.get_local_rank(1)  # rows of this rank and of later ones
    local = torch.empty(min(max(left, 0), rows), shape[1], device="meta")
    placements = [Replicate(), Shard(0)]
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    return torch.nn.Parameter(whole)


def measure(build: Path, case: Case) -> tuple[float, float]:
    """Return the seconds and the megabytes that constructing an optimizer for a case takes in this process."""
    kernel, _ = load_built(build)
    parameters = sharded_parameters(case)
    gc.collect()
    before, start = peak_megabytes(), time.process_time()
    kernel.Muon(parameters)
    return time.process_time() - start, peak_megabytes() - before


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row_of(build: Path, case: Case, rounds: int) -> dict:
    """Return a row of the result file."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        seconds, megabytes = zip(*(processes.apply(measure, (build, case)) for _ in range(rounds)))
    targets = {"target_seconds": TARGET_SECONDS, "target_megabytes": TARGET_MEGABYTES}
    return {**case._asdict(), "seconds": statistics.median(seconds), "megabytes": max(megabytes), **targets}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time and weigh the plan of a large model on many ranks.")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="what tools.build.variants has made")
    parser.add_argument("--rounds", type=int, default=5, help="processes that each case is planned in")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results, none if tiny")
    parser.add_argument("--tiny", action="store_true", help="a small model and one round, to see that it runs")
    options = parser.parse_args(arguments)
    kernel, _ = load_built(options.build)
    device = torch.device("cpu")  # where every plan is made
    cases, rounds = (TINY_CASES, 1) if options.tiny else (CASES, options.rounds)
    path = options.output or (None if options.tiny else default_path("plan", device))
    results = ResultFile(path, facts(kernel, device, {"rounds": rounds}), list(map(str, cases)))
    for case in cases:
        if not results.is_measured(str(case)):
            results.put(str(case), row_of(options.build, case, rounds))
    print_results(list(results.rows.values()))


if __name__ == "__main__":
    main()
