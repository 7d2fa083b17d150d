"""Time what a step costs the host: Python, and torch's dispatch. Needs no GPU.

    python -m benchmarks.sweep_host_time [--variant PATH]... [--cases TEXT] [--minutes N] [--output FILE] [--tiny]

Matrices are tiny, so that torch's own operations take no noticeable time. The package's compiled ops, which a GPU
would run meanwhile, do nothing: each is dispatched, which takes about as long as a launch. Their results are whatever
the memory contains; nothing in the step depends on it.

The last case is one rank's side of 4,000 matrices over 64 ranks, of which no other exists: see `host_cases.py`. The
target of all cases is TARGET milliseconds per 100 matrices, which is 40 ms for that one.

Several builds, each a `--variant`, take turns round by round, in separate processes. A ratio is a build's host
time divided by that of the first in the same round; all are quartiles over the rounds. The commit that a results file
names first is that of the first build.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.built_kernel import load_variant
from benchmarks.host_cases import CASES, CHUNK_BYTES, TINY_CASES, Case
from benchmarks.host_worker import Worker
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.terminal import print_results
from benchmarks.timing import LEAST_ROUNDS, Deadline, quartiles, ratios
from benchmarks.variants import chosen_variants
from tests.support.proofs import race

TARGET = 1.0
ROUNDS, TINY_ROUNDS = 25, 3
# The fewest matrices that a round steps over: short steps are repeated.
MATRICES_IN_A_ROUND = 2000
# The first step compares plans with the other ranks.
WARM_UP = 3


def measure(case: Case, variants: Mapping[str, Path], rounds: int, deadline: Deadline) -> dict[str, dict]:
    """Return the row of each variant, by label. If time runs out, there are fewer rounds."""
    with ExitStack() as stack:
        workers = {label: stack.enter_context(Worker(folder, case)) for label, folder in variants.items()}
        seconds = take_turns(workers, max(1, MATRICES_IN_A_ROUND // case.matrices), rounds, deadline)
    first = next(iter(seconds.values()))
    return {
        label: {
            "build": label,
            "matrices": case.matrices,
            "ranks": case.ranks,
            "rounds": len(times),
            "host_milliseconds": [1e3 * t for t in quartiles(times)],
            "host_milliseconds_per_100_matrices": 1e5 * quartiles(times).middle / case.matrices,
            "target_milliseconds_per_100_matrices": TARGET,
            "over_first": list(ratios(times, first)),
        }
        for label, times in seconds.items()
    }


def take_turns(workers: Mapping[str, Worker], steps: int, rounds: int, deadline: Deadline) -> dict[str, list[float]]:
    """Return the seconds of a step of each worker, round by round; each round has another order."""
    labels = list(workers)
    for worker in workers.values():  # start all of them before one is timed
        worker.steps(WARM_UP)
    seconds: dict[str, list[float]] = {label: [] for label in labels}
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and deadline.passed():
            break
        for label in race.order_of_round(labels, turn):
            seconds[label].append(workers[label].steps(steps))
    return seconds


def run_cases(cases: Sequence[Case], variants: Mapping[str, Path], options: argparse.Namespace) -> list[dict]:
    """Return the rows of every case and variant; each is written into the results file as soon as it is known."""
    rounds, device = TINY_ROUNDS if options.tiny else ROUNDS, torch.device("cpu")
    kernel = load_variant(next(iter(variants.values())))
    settings = {"threads": 1, "rounds": rounds, "chunk_bytes": CHUNK_BYTES, "builds": list(variants)}
    path = options.output or (None if options.tiny else default_path("host-time", device))
    keys = {case: {label: row_name(case, label, variants) for label in variants} for case in cases}
    names = [key for of_case in keys.values() for key in of_case.values()]
    results = ResultFile(path, facts(kernel, device, settings), names)
    deadline = Deadline(options.minutes)
    for case, of_case in keys.items():
        if all(map(results.is_measured, of_case.values())) or deadline.passed():
            continue
        for label, row in measure(case, variants, rounds, deadline).items():
            results.put(of_case[label], row)
    return [results.rows[name] for name in names]


def row_name(case: Case, label: str, variants: Mapping[str, Path]) -> str:
    return str(case) if len(variants) == 1 else f"{case}, {label}"


def chosen_cases(text: str | None, cases: Sequence[Case]) -> list[Case]:
    """Return the cases whose name contains `text`; ValueError if there are none."""
    chosen = [case for case in cases if text is None or text in str(case)]
    if not chosen:
        raise ValueError(f"--cases must be part of one of: {'; '.join(map(str, cases))}; got {text}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time what a step costs the host.")
    parser.add_argument("--variant", type=Path, action="append", help="a build, or the folder that holds it; build/")
    parser.add_argument("--cases", metavar="TEXT", help="only those whose name has this in it, such as `64 ranks`")
    parser.add_argument("--minutes", type=float, help="after this time end the case at hand and start no other")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results, none if tiny")
    parser.add_argument("--tiny", action="store_true", help="small models and few rounds, to see that it runs")
    options = parser.parse_args(arguments)
    cases = chosen_cases(options.cases, TINY_CASES if options.tiny else CASES)
    rows = run_cases(cases, chosen_variants(options.variant), options)
    print_results(rows)


if __name__ == "__main__":
    main()
