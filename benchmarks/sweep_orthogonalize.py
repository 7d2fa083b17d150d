"""Time the orthogonalization of named models' matrices, and of squares, against every other implementation found.

    python -m benchmarks.sweep_orthogonalize [--build DIR] [--device cpu] [--shapes gpt2-124m,squares,64x1280x512]
        [--contestants NAME,...] [--peers DIR] [--minutes N] [--output FILE] [--work-dtype float32] [--beside-busy]
        [--tiny]

All contestants take turns on the same float32 matrices. A ratio is their time divided by ours in the same round, given
as quartiles over the rounds. Ideal is the FLOP of the cheapest method with symmetric products (`work.least_flop`) at
the rate that a large dense product of the work dtype reaches in the same rounds. Errors are those of the first matrix
against each contestant's own polynomial in float64: relative in the Frobenius norm, and the largest of an entry.
Compiled means the standard iteration over torch's products under `torch.compile`. Replayed means ours as a CUDA graph,
which is what steps run after a warm-up; a CPU has none.

On GPUs that the package's model of products knows, the time that it predicts stands beside ours, and what it predicts
for torch's products over ours beside theirs (`benchmarks.predicted_factors`). Passes over memory move as many bytes in
a second there as a copy does in the same rounds. Predictions are of kernels alone, so small matrices take longer unless
they are replayed.

`--work-dtype` is that of ours and of torch's products; without it the device's default.

`--beside-busy` adds a case for each shape in which other processes, one for each core, compute all the time.

Results are written after every shape, and a second run with the same `--output` continues the first one. The row of a
case that raises has the error, and a later run tries it last. A peer that makes the GPU unusable ends the run with an
error, and no later one launches it: it is marked in all rows that are then measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.busy import beside_busy
from benchmarks.exact_polynomial import errors, exact_factor
from benchmarks.lost_gpu import blaming
from benchmarks.orthogonalize_cases import CPU_SIZE, Case, default_cases, find_cases
from benchmarks.orthogonalizers import (
    COMPILED,
    NAMES,
    OURS,
    OWN,
    PEERS,
    STEPS,
    Contestant,
    Task,
    find_contestant,
)
from benchmarks.predicted_factors import predicted_factors
from benchmarks.predicted_step import modelled_gpu
from benchmarks.result_file import UNMEASURED, has_error
from benchmarks.shapes import MODELS
from benchmarks.sweep_options import chosen_contestants, make_parser, prepare, run_cases, sizes
from benchmarks.terminal import print_results
from benchmarks.timing import Deadline, quartiles, ratios, run_rounds
from benchmarks.work import dense_flop, factor_bytes, ideal_seconds, least_flop

SCHEDULE = "polar_express"
ROUNDS = {"cuda": 30, "cpu": 10}
# Bytes that a copy reads and writes: several times the largest cache of a GPU.
COPIED_BYTES = 1 << 30
# Our time by the model, and that of torch's products.
PREDICTED = "predicted_milliseconds", "predicted_torch_milliseconds"


class Bench(NamedTuple):
    """What stays the same for all cases of a run."""

    kernel: ModuleType
    device: torch.device
    contestants: tuple[str, ...]
    compile_mode: str
    work_dtype: str  # as torch calls it
    is_default: bool  # whether that is the device's default, for which `auto` may choose another iteration
    rounds: int
    dense_side: int


def measure(case: Case, bench: Bench, deadline: Deadline, lost: Mapping[str, str]) -> dict:
    """Return the row of one case. Those that have `lost` the GPU before have these marks."""
    kernel, device = bench.kernel, bench.device
    # Otherwise the sizes of all cases would count towards torch's limit of recompilations.
    torch.compiler.reset()
    generator = torch.Generator(device).manual_seed(0)
    G = torch.randn(case.batch, case.rows, case.cols, generator=generator, device=device)
    schedule = kernel.schedules.resolve_schedule(SCHEDULE, STEPS)
    work_dtype = getattr(torch, bench.work_dtype)
    circumstances = kernel.kernels.circumstances.Circumstances(default_dtype=bench.is_default)
    iteration = kernel.iteration.choose_iteration(device, work_dtype, case.sides, schedule, circumstances=circumstances)
    task = Task(kernel, device, iteration, schedule, bench.compile_mode)
    contestants, marks = peers.admit(bench.contestants, lambda name: _warm(name, task, G), lost)
    outcomes = _compare(contestants, G, device.type == "cuda" or case.size <= CPU_SIZE)
    A = torch.randn(bench.dense_side, bench.dense_side, generator=generator, device=device).to(work_dtype)
    works = {name: lambda run=contestant.run: run(G) for name, contestant in contestants.items()}
    limits = {"dense": lambda: A @ A, **_copy(kernel, device)}
    times = run_rounds({**works, **limits}, device, bench.rounds, deadline)
    for name, outcome in outcomes.items():
        outcome["milliseconds"] = [1e3 * t for t in quartiles(times[name])]
        outcome["ratio"] = list(ratios(times[name], times[OURS]))
    rate = 2 * bench.dense_side**3 / quartiles(times["dense"]).middle
    return {
        "models": case.models,
        "matrices": case.count,
        "shape": [case.batch, case.rows, case.cols],
        "method": str(iteration),
        **_bound(case, task, rate, quartiles(times[OURS]).middle),
        **predicted(case, task, COPIED_BYTES / quartiles(times["copy"]).middle if "copy" in times else None),
        "rounds": len(times[OURS]),
        "contestants": {name: outcomes.get(name, marks.get(name, UNMEASURED)) for name in NAMES},
    }


def _copy(kernel: ModuleType, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return what copies COPIED_BYTES / 2 inside a GPU's memory; nothing where no time is predicted."""
    if modelled_gpu(kernel, device) is None:
        return {}
    source, target = (torch.empty(COPIED_BYTES // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return {"copy": lambda: target.copy_(source)}


def predicted(case: Case, task: Task, copied: float | None) -> dict[str, float | None]:
    """Return the milliseconds that the model predicts for our iteration and for torch's products; None where none."""
    if copied is None:
        return dict.fromkeys(PREDICTED)
    shape, iterations = (case.batch, case.rows, case.cols), (task.iteration, task.over_torch)
    seconds = (predicted_factors(task.kernel, each, shape, task.device, copied) for each in iterations)
    return {key: None if duration is None else 1e3 * duration for key, duration in zip(PREDICTED, seconds)}


def _bound(case: Case, task: Task, rate: float, seconds: float) -> dict:
    """Return the work of the case, and the share of the device's limit that `seconds` reach."""
    work_dtype = task.iteration.work_dtype
    flop = case.batch * least_flop(task.kernel, task.device, work_dtype, case.sides, task.schedule)
    ideal = ideal_seconds(flop, rate)
    return {
        "flop": flop,
        "dense_flop": case.batch * dense_flop(*case.sides, STEPS),
        "bytes": case.batch * factor_bytes(*case.sides, 4, work_dtype.itemsize),
        "dense_rate": rate,
        "milliseconds": 1e3 * seconds,
        "ideal_milliseconds": 1e3 * ideal,
        "share_of_ideal": ideal / seconds,
    }


def _warm(name: str, task: Task, G: Tensor) -> Contestant:
    """Run a contestant once and return it."""
    contestant = find_contestant(name, task)
    contestant.run(G)[0].sum().item()
    return contestant


def _compare(contestants: dict[str, Contestant], G: Tensor, exactly: bool) -> dict[str, dict]:
    """Return each contestant's errors on the first matrix, or `unmeasured` if that would take too long."""
    outcomes, exact = {}, {}
    for name, contestant in contestants.items():
        outcomes[name] = {"error": UNMEASURED, "largest_error": UNMEASURED}
        if exactly:
            schedule = tuple(contestant.schedule)
            if schedule not in exact:
                exact[schedule] = exact_factor(G[0], schedule)
            with blaming(name):
                relative, largest = errors(contestant.run(G[:1])[0], exact[schedule])
            outcomes[name] = {"error": relative, "largest_error": largest}
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("Time the orthogonalization against every peer that is installed.", PEERS)
    parser.add_argument("--shapes", help=f"of {', '.join(MODELS)}, squares, and shapes like 64x1280x512")
    parser.add_argument("--work-dtype", choices=("float32", "bfloat16", "float16"), help="of the iteration")
    parser.add_argument("--beside-busy", action="store_true", help="also beside a busy process on every core")
    parser.add_argument("--compile-mode", default="default", help="of torch.compile")
    options = parser.parse_args(arguments)
    kernel, device = prepare(options)
    # Compiling takes seconds for every shape.
    default = [name for name in PEERS if not (options.tiny and name == COMPILED)]
    contestants = chosen_contestants(options.contestants, OWN, PEERS, default)
    rounds, side = sizes(options, device, ROUNDS)
    usual = kernel.iteration.default_work_dtype(torch.empty(0, device=device))
    work_dtype = options.work_dtype or str(usual).replace("torch.", "")
    is_default = options.work_dtype is None
    bench = Bench(kernel, device, contestants, options.compile_mode, work_dtype, is_default, rounds, side)
    names = options.shapes.split(",") if options.shapes else ["tiny"] if options.tiny else []
    cases = find_cases(names, device) if names else default_cases(device)
    works = {case.key: partial(measure, case, bench) for case in cases}
    if options.beside_busy:
        works |= {f"{key} beside busy cores": partial(beside_busy, work) for key, work in works.items()}
    rows = run_cases("orthogonalize", bench, options, {"schedule": SCHEDULE, "input_dtype": "float32"}, works)
    print_results(rows, "orthogonalize")
    return int(any(map(has_error, rows)))


if __name__ == "__main__":
    sys.exit(main())
