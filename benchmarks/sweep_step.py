"""Time whole optimizer steps over the parameters of named models against every other Muon that is installed.

    python -m benchmarks.sweep_step [--build DIR] [--device cpu] [--models gpt2-124m,vit-s] [--contestants NAME,...]
        [--peers DIR] [--minutes N] [--output FILE] [--beside-busy] [--tiny]

All contestants take turns over the same float32 parameters and gradients, each with its own state. A ratio is their
time divided by ours in the same round, given as quartiles over the rounds; on a GPU there is a second one, to ours
after its warm-up. The error is that of a first update, without its step size, from each contestant's own polynomial in
float64: relative in the Frobenius norm, over one matrix of each shape. Ideal is the FLOP of the cheaper methods with
symmetric products at the rate of a large dense product in the same rounds; `breakdown` says where the rest of our step
goes. Peak memory, in 10^6 bytes, is the most that torch's allocator had given out at a moment of one step after all
rounds, less what it had given out before that step. So it has neither parameters, gradients and state, nor what steps
keep for later ones, such as the memory of CUDA graphs. Kernels are counted on GPUs only, without copies and fills.

`--beside-busy` adds a case for each model in which other processes, one for each core, compute all the time.

Results are written after every model, and a second run with the same `--output` continues the first one. The row of a
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
from benchmarks.exact_polynomial import exact_factor
from benchmarks.lost_gpu import blaming
from benchmarks.orthogonalizers import STEPS
from benchmarks.result_file import UNMEASURED, has_error
from benchmarks.shapes import MODELS, TINY_MODEL, Parameter, matrix_counts
from benchmarks.step_costs import breakdown, host_milliseconds, launched_kernels, peak_bytes
from benchmarks.step_rivals import (
    LR,
    NAMES,
    OURS,
    OWN,
    PEERS,
    SETTINGS,
    WARMED_UP,
    Rival,
    Weights,
    find_rival,
    make_weights,
    step_of,
)
from benchmarks.sweep_options import chosen, chosen_contestants, make_parser, prepare, run_cases, sizes
from benchmarks.terminal import print_results
from benchmarks.timing import Deadline, quartiles, ratios, run_rounds
from benchmarks.work import dense_flop, ideal_seconds, least_flop

CPU_MODELS = ("gpt2-124m", "vit-s", "resnet-50")
GPU_MODELS = (*CPU_MODELS, "llama-1b", "moe-64")

ROUNDS = {"cuda": 20, "cpu": 7}
HOST_STEPS = 20


class Bench(NamedTuple):
    """What stays the same for all models of a run."""

    kernel: ModuleType
    device: torch.device
    contestants: tuple[str, ...]
    rounds: int
    dense_side: int


def measure(parameters: Sequence[Parameter], bench: Bench, deadline: Deadline, lost: Mapping[str, str]) -> dict:
    """Return the row of one model. Those that have `lost` the GPU before have these marks."""
    kernel, device = bench.kernel, bench.device
    host = host_milliseconds(kernel, parameters, device, HOST_STEPS)
    pieces = breakdown(kernel, parameters, device, max(1, bench.rounds // 2))
    errors, marks = find_errors(parameters, bench, lost)
    weights = make_weights(parameters, device)  # for all: a copy for each would fill a GPU
    steps, failed = peers.admit(errors, lambda name: _first_step(name, weights, bench), lost)
    marks |= failed
    iterations = _iterations(parameters, bench)
    work_dtype = next(iter(iterations.values())).work_dtype
    A = torch.randn(bench.dense_side, bench.dense_side, device=device).to(work_dtype)
    times = run_rounds({**steps, "dense": lambda: A @ A}, device, bench.rounds, deadline)
    outcomes = {}
    for name, step in steps.items():
        with blaming(name):
            outcomes[name] = {
                "milliseconds": [1e3 * t for t in quartiles(times[name])],
                "ratio": list(ratios(times[name], times[OURS])),
                "ratio_to_warmed_up": list(ratios(times[name], times[WARMED_UP])) if WARMED_UP in times else None,
                "error": errors[name],
                "peak_bytes": peak_bytes(step, device),
                "kernels": launched_kernels(step) if device.type == "cuda" else UNMEASURED,
            }
    rate = 2 * bench.dense_side**3 / quartiles(times["dense"]).middle
    return {
        **_work(parameters, iterations, bench, rate),
        "milliseconds": outcomes[OURS]["milliseconds"][1],
        "host_milliseconds_per_100_matrices": host,
        "breakdown": pieces,
        "rounds": len(times[OURS]),
        "contestants": {name: outcomes.get(name, marks.get(name, UNMEASURED)) for name in NAMES},
    }


def _iterations(parameters: Sequence[Parameter], bench: Bench) -> dict:
    """Return how our optimizer orthogonalizes each (rows, columns)."""
    kernel, device = bench.kernel, bench.device
    schedule = kernel.schedules.resolve_schedule("polar_express", STEPS)
    work_dtype = kernel.iteration.default_work_dtype(torch.empty(0, device=device))
    circumstances = kernel.kernels.circumstances.Circumstances(default_dtype=True)
    choose = partial(kernel.iteration.choose_iteration, device, work_dtype, circumstances=circumstances)
    return {shape: choose((min(shape), max(shape)), schedule) for shape in matrix_counts(parameters)}


def _work(parameters: Sequence[Parameter], iterations: dict, bench: Bench, rate: float) -> dict:
    """Return the size of the model and the least work of its matrices."""
    counts = matrix_counts(parameters)
    sides = {shape: (min(shape), max(shape)) for shape in counts}
    schedule = bench.kernel.schedules.resolve_schedule("polar_express", STEPS)
    flop = sum(
        count * least_flop(bench.kernel, bench.device, iterations[shape].work_dtype, sides[shape], schedule)
        for shape, count in counts.items()
    )
    dense = sum(count * dense_flop(*sides[shape], STEPS) for shape, count in counts.items())
    return {
        "parameters": sum(p.elements for p in parameters),
        "matrices": sum(counts.values()),
        "methods": sorted({str(iteration) for iteration in iterations.values()}),
        "flop": flop,
        "dense_flop": dense,
        "dense_rate": rate,
        "ideal_milliseconds": 1e3 * ideal_seconds(flop, rate),
    }


def find_errors(
    parameters: Sequence[Parameter], bench: Bench, lost: Mapping[str, str]
) -> tuple[dict[str, float | str], dict[str, str]]:
    """Return the error of each contestant that steps (`-` if it does not orthogonalize), and the others' marks."""
    few = [Parameter("matrix", shape, True) for shape in matrix_counts(parameters)]
    few.append(Parameter("vector", (8,)))
    exact: dict[tuple, list[Tensor]] = {}

    def error_of(name: str) -> float | str:
        rival = find_rival(name, bench.kernel, bench.device)
        return "-" if rival.schedule is None else _error(rival, few, bench.device, exact)

    return peers.admit(bench.contestants, error_of, lost)


def _error(rival: Rival, parameters: Sequence[Parameter], device: torch.device, exact: dict) -> float:
    """Return the relative error of a first update. `exact` caches the exact matrices of each schedule between calls."""
    weights = make_weights(parameters, device)
    schedule = tuple(rival.schedule)
    if schedule not in exact:
        exact[schedule] = [exact_factor(p.grad, schedule) for p in weights.matrices]
    step_of(rival.build(weights))()
    wrong = total = 0.0
    for p, factor in zip(weights.matrices, exact[schedule]):
        update = _direction(p, rival)
        wrong += (update - factor).square().sum().item()
        total += factor.square().sum().item()
    return (wrong / total) ** 0.5


def _direction(p: Tensor, rival: Rival) -> Tensor:
    # Parameters begin at zero, so that weight decay does nothing and only the update is rounded.
    return p.detach().double() / (-LR * rival.multiplier(*p.shape))


def _first_step(name: str, weights: Weights, bench: Bench) -> Callable[[], None]:
    """Return the step of a contestant, after a first one."""
    step = step_of(find_rival(name, bench.kernel, bench.device).build(weights))
    step()
    return step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("Time whole steps against every other Muon that is installed.", PEERS)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--beside-busy", action="store_true", help="also beside a busy process on every core")
    options = parser.parse_args(arguments)
    kernel, device = prepare(options)
    contestants = chosen_contestants(options.contestants, OWN, PEERS, PEERS)
    rounds, side = sizes(options, device, ROUNDS)
    bench = Bench(kernel, device, contestants, rounds, side)
    default = CPU_MODELS if device.type == "cpu" else GPU_MODELS
    names = chosen(options.models, list(MODELS), default, "models")
    models = {"tiny": TINY_MODEL} if options.tiny else {name: MODELS[name] for name in names}
    works = {name: partial(measure, model, bench) for name, model in models.items()}
    if options.beside_busy:
        works |= {f"{name} beside busy cores": partial(beside_busy, work) for name, work in works.items()}
    rows = run_cases("step", bench, options, {"settings": SETTINGS}, works)
    print_results(rows, "step")
    return int(any(map(has_error, rows)))


if __name__ == "__main__":
    sys.exit(main())
