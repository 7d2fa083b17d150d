"""What the package's model assumes, measured one by one: the first numbers to know about an unknown GPU.

Beside what was measured is what the model says, as `predicted_...`, where it says anything. All items together take
seconds, need no tuning, and show which assumption is wrong.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from benchmarks import sweep_symmetric_gemm
from benchmarks.predicted_step import GAP, modelled_gpu
from benchmarks.timing import replayed, take_turns
from tests.support.proofs import products, roundings
from tools.lab.items import FailedError, Item, Lab, require_triton

# One matrix has too few tiles for a GPU, 16 of them have enough.
BATCHES, SIDE, TINY_SIDE = (1, 16), 2048, 32

# Sides at which torch may cut a sum over k into parts, since there are few tiles.
ROW_SIDES, TINY_ROW_SIDES = (512, 1024), (32,)

# Passes in a graph, and how many times as many bytes the larger ones move: a quarter of the cache, since on NVIDIA's
# GPUs a line may lie in both of its halves.
PASSES, TIMES, CPU_CACHE = 64, 16, 1 << 23

# (b, m, k) of a product that takes a GPU less time than the host needs to launch it, as in `benchmarks.sweep_launch`,
# and how many are launched without waiting: fewer than a GPU's queue holds.
LAUNCHED, LAUNCHES, TINY_LAUNCHES = (2, 128, 256), 200, 5


def items(lab: Lab) -> Iterator[Item]:
    """Yield the calibrations, the likeliest to show a fault first."""
    side = TINY_SIDE if lab.tiny else SIDE
    for batch in BATCHES:
        yield Item(f"product of {batch} x {side} x {side}", partial(product, lab, (batch, side, side)))
    for side in TINY_ROW_SIDES if lab.tiny else ROW_SIDES:
        yield Item(f"one dominant row, {side}", partial(dominant_row, lab, side))
    yield Item("launches", partial(launches, lab))
    yield Item("passes in a graph", partial(passes, lab))


def product(lab: Lab, shape: tuple[int, int, int]) -> dict:
    """Prove our product in float16 against float64, and time it and torch's. Rates are of a full product's FLOPs."""
    require_triton(lab)
    measurement = sweep_symmetric_gemm.measure(lab.kernel, shape, "float16", lab.device)
    if measurement.problems:
        raise FailedError("; ".join(measurement.problems), asdict(measurement))
    tera_flops = partial(sweep_symmetric_gemm.dense_tera_flops, shape)
    return {
        "torch_tera_flops": tera_flops(measurement.torch_seconds),
        "predicted_torch_tera_flops": tera_flops(measurement.predicted_torch_seconds),
        "torch_spread": measurement.torch_spread,
        "tera_flops": tera_flops(measurement.seconds),
        "predicted_tera_flops": tera_flops(measurement.predicted_seconds),
        "spread": measurement.spread,
    }


def dominant_row(lab: Lab, m: int) -> dict:
    """Multiply a matrix of which one row is far larger than the others as a step does, by torch's product in float16.

    torch lets cuBLAS add parts of a sum in float16, and those of A A come near its largest number. Errors are divided
    by what rounding explains if sums run in float32. Parts in float16 make them larger than 1, but finite.
    """
    table, schedules, stability = lab.kernel.kernels.products.BATCHED, lab.kernel.schedules, lab.kernel.stability
    schedule = schedules.resolve_schedule("polar_express", 5)
    scale = stability.folded_scale(torch.float16, m, schedule)
    _, b, c = schedules.with_folded_scale(schedule, scale)[0]
    like = torch.empty(0, dtype=torch.float16, device=lab.device)
    # The norm that the largest singular value may reach during the schedule.
    X = products.adversarial(like, m, 2 * m)[2:] * (scale * stability.largest_value(schedule) / products.SCALE)
    A = table.gram(X)
    B = table.gram_affine(A, b, c, 0.0)
    figures = {
        "gram_error": largest_error(A, *roundings.product(X[0], X[0].mT, 1.0)),
        "square_error": largest_error(B, *roundings.product(A[0], A[0], c, (b, A[0]))),
        "largest_part": (A[0].double() ** 2).sum(-1).max().item(),
    }
    if not (A.isfinite().all() and B.isfinite().all()):
        raise FailedError("a sum has left float16's range", figures)
    return figures


def largest_error(C: Tensor, exact: Tensor, allowed: Tensor) -> float:
    """Return the largest error of the one matrix in C, in units of what is allowed."""
    return ((C[0].double() - exact).abs() / allowed).max().item()


def launches(lab: Lab) -> dict:
    """Time what the host needs to launch a small product: ours, and torch's. The model leaves the host's time out."""
    require_triton(lab)
    X = torch.zeros(LAUNCHED, dtype=torch.float16, device=lab.device)
    out = X @ X.mT
    ours = partial(lab.kernel.kernels.products.symmetric_product, X, X.mT, out=out)
    torchs = partial(torch.bmm, X, X.mT, out=out)
    count = TINY_LAUNCHES if lab.tiny else LAUNCHES
    return {
        "microseconds": 1e6 * host_seconds(ours, count, lab),
        "torch_microseconds": 1e6 * host_seconds(torchs, count, lab),
    }


def host_seconds(call: Callable[[], object], count: int, lab: Lab) -> float:
    """Return the median time in which the host makes one of `count` calls, while the device may still be at them."""
    times = []
    for _ in range(lab.rounds + 1):
        if lab.device.type == "cuda":
            torch.cuda.synchronize(lab.device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times[1:])  # the first ones compile


def passes(lab: Lab) -> dict:
    """Time passes over data in the cache, one after the other in a graph: their rate, and the gap between two.

    A pass takes its gap and the time of its bytes, so two sizes tell both apart.
    """
    cache = CPU_CACHE if lab.device.type == "cpu" else torch.cuda.get_device_properties(lab.device).L2_cache_size
    large = cache // 4
    sizes = large // TIMES, large
    works = [replayed([one_pass(lab.device, moved)] * PASSES, lab.device) for moved in sizes]
    (few, _), (many, spread) = take_turns(works, lab.device, lab.rounds)
    if many <= few:
        raise FailedError("more bytes took no more time", {"few_seconds": few, "many_seconds": many})
    rate = PASSES * (large - large // TIMES) / (many - few)
    gap = few / PASSES - sizes[0] / rate
    return {
        "bytes": large,
        "spread": spread,
        "giga_bytes": rate / 1e9,
        "needed_by_tiles_giga_bytes": needed_by_tiles(lab),
        "gap_microseconds": 1e6 * gap,
        "predicted_gap_microseconds": 1e6 * GAP,
    }


def one_pass(device: torch.device, moved: int) -> Callable[[], object]:
    """Return a pass that reads half of `moved` bytes and writes the other half."""
    source = torch.zeros(moved // 8, dtype=torch.float32, device=device)
    return partial(torch.neg, source, out=torch.empty_like(source))


def needed_by_tiles(lab: Lab) -> float | None:
    """Return the GB/s that all symmetric products read from the cache at the model's rate, None without one.

    The model takes the cache of 9.0 to deliver no more. A pass writes, too, so it may be slower.
    """
    gpu, model = modelled_gpu(lab.kernel, lab.device), lab.kernel.kernels.speeds.predictions
    if gpu is None:
        return None
    rates = model.RATES[gpu.capability]
    flops_of_a_byte = model.TILE / 2  # two panels of 2 bytes an element, for 2 TILE² FLOP an element of k
    return gpu.multiprocessors * rates.sustained * rates.symmetric / flops_of_a_byte / 1e9
