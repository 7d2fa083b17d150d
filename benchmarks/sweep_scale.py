"""Time what published models cost the host of one of hundreds of ranks: the plan, and a step. Needs no GPU.

    python -m benchmarks.sweep_scale [--build DIR] [--cases TEXT] [--rounds N] [--output FILE] [--tiny]

Llama 70B is laid out as by FSDP2, in 256 shards, on 1,024 ranks with 4 copies of these (HSDP). In the mixture of
experts each layer's 384 experts are split over 64 ranks and the rows of each over 16; everything else has 256 shards
and 4 copies. No other rank exists, and no memory of that size is touched: `scale_cases.py` says what is replaced by
what.

Every round is a separate process. Seconds are processor time of one thread. Those of the plan are the median of
the rounds. Megabytes are the growth of the process's peak memory, the largest of the rounds (Linux). Milliseconds
of a step are quartiles over all steps of all rounds. Only messages that are not empty and go to another rank count;
blocks are what an owner copies between messages and batches.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim import Optimizer

from benchmarks.built_kernel import find_variant, load_built, read_metadata
from benchmarks.host_worker import empty_ops
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.scale_cases import CASES, TINY_CASES, Case, build_optimizer, imagined, untouched
from benchmarks.sweep_host_time import chosen_cases
from benchmarks.sweep_plan import ROOT, TARGET_MEGABYTES, peak_megabytes
from benchmarks.terminal import print_results
from benchmarks.timing import processor_seconds, quartiles

ROUNDS, TINY_ROUNDS = 5, 1
STEPS, TINY_STEPS = 15, 3  # of a round
# The first step compares plans with the other ranks.
WARM_UP = 3


class Round(NamedTuple):
    """The results of one process."""

    plan_seconds: float
    plan_megabytes: float
    step_seconds: list[float]
    counts: dict[str, int]


def run_round(build: Path, case: Case, steps: int) -> Round:
    """Plan a case and step over it in this process."""
    torch.set_num_threads(1)
    with imagined(case.ranks):
        kernel, _ = load_built(build)
        emptied = empty_ops(read_metadata(find_variant(build))["id"])
        with untouched(kernel), planning_timed(kernel) as plan:
            optimizer = build_optimizer(kernel, case)
            times = [processor_seconds(optimizer.step) for _ in range(WARM_UP + steps)][WARM_UP:]
        del emptied
        return Round(plan["seconds"], plan["megabytes"], times, counts_of(optimizer))


@contextmanager
def planning_timed(kernel: ModuleType) -> Iterator[dict[str, float]]:
    """Yield where the seconds and megabytes of the next plan will stand."""
    costs, make_plan = {}, kernel.step.plan_cache.make_plan

    def timed(*arguments):
        gc.collect()
        before, start = peak_megabytes(), time.process_time()
        plan = make_plan(*arguments)
        costs.update(seconds=time.process_time() - start, megabytes=peak_megabytes() - before)
        return plan

    with mock.patch.object(kernel.step.plan_cache, "make_plan", timed):
        yield costs


def counts_of(optimizer: Optimizer) -> dict[str, int]:
    """Return the counts of what a step on this rank goes through."""
    pairs = [(chunk, each.position) for each in optimizer._plan_cache.plan.exchanges for chunk in each.chunks]
    lengths = [(side.sent, at) for chunk, at in pairs for side in (chunk.messages.holder, chunk.messages.owner)]
    batches = [owned for chunk, _ in pairs for chain in chunk.chains for owned in chain]
    return {
        "chunks": len(pairs),
        "messages": sum(length > 0 and to != at for sent, at in lengths for to, length in enumerate(sent)),
        "parts": sum(len(chunk.messages.holder.parts) for chunk, _ in pairs),
        "owned": sum(len(owned.batch.matrices) for owned in batches),
        "batches": len(batches),
        "blocks": sum(len(owned.blocks_in) + len(owned.blocks_out) for owned in batches),
    }


def row_of(build: Path, case: Case, rounds: int, steps: int) -> dict:
    """Return a row of the result file."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        done = [processes.apply(run_round, (build, case, steps)) for _ in range(rounds)]
    return {
        "ranks": case.ranks,
        "plan_seconds": statistics.median(each.plan_seconds for each in done),
        "plan_megabytes": max(each.plan_megabytes for each in done),
        "host_milliseconds": [1e3 * t for t in quartiles([t for each in done for t in each.step_seconds])],
        **done[0].counts,
        "target_seconds": case.target_seconds,
        "target_megabytes": TARGET_MEGABYTES,
        "target_milliseconds": case.target_milliseconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time what published models on many ranks cost the host of one.")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="what tools.build.variants has made")
    parser.add_argument("--cases", metavar="TEXT", help="only those whose name has this in it, such as `MoE`")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes that each case is measured in")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results, none if tiny")
    parser.add_argument("--tiny", action="store_true", help="a small model and one round, to see that it runs")
    options = parser.parse_args(arguments)
    rounds, steps = (TINY_ROUNDS, TINY_STEPS) if options.tiny else (options.rounds, STEPS)
    cases = chosen_cases(options.cases, TINY_CASES if options.tiny else CASES)
    kernel, _ = load_built(options.build)
    device = torch.device("cpu")  # even if there is a GPU: no memory is touched
    path = options.output or (None if options.tiny else default_path("scale", device))
    settings = {"threads": 1, "rounds": rounds, "steps": steps}
    results = ResultFile(path, facts(kernel, device, settings), list(map(str, cases)))
    for case in cases:
        if not results.is_measured(str(case)):
            results.put(str(case), row_of(options.build, case, rounds, steps))
    print_results(list(results.rows.values()))


if __name__ == "__main__":
    main()
