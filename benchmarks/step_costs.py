"""The costs of a step: time by piece, the host's share, memory, launches."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.shapes import Parameter
from benchmarks.step_rivals import build_ours, make_weights, step_of

WARM_UP = 2

# For the host's time matrices have sides this many times shorter, so that moving them takes no noticeable time.
SHRINKING, SMALLEST_SIDE = 32, 2

PRODUCTS = {
    "gram": "gram", "gram_affine": "square", "commuting": "square", "conjugated": "square", "affine": "affine",
    "newton_schulz": "newton_schulz", "gram_newton_schulz": "newton_schulz",
}  # fmt: skip
PIECES = (
    "momentum_pack", "normalise", "gram", "square", "affine", "newton_schulz", "small_polar", "descend", "adamw",
)  # fmt: skip
EMPTY_PRODUCTS = {
    "gram": lambda X, out=None: X.new_empty(*X.shape[:-1], X.size(-2)),
    "gram_affine": lambda A, b, c, a, out=None: torch.empty_like(A),
    "commuting": lambda A, B, out=None: torch.empty_like(A),
    "conjugated": lambda A, B: torch.empty_like(A),
    "affine": lambda B, X, a, out=None: torch.empty_like(X),
    "newton_schulz": lambda X, schedule, squares=None: X,
    "gram_newton_schulz": lambda X, windows, squares=None: X,
}


@contextlib.contextmanager
def replaced(kernel: ModuleType, functions: dict[Any, Any]) -> Iterator[None]:
    """Replace the kernel's functions by others, in every module of it that has imported them."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{kernel.__name__}.")]
    changed = []
    for module in modules:
        for name, value in list(vars(module).items()):
            other = next((new for old, new in functions.items() if old is value), None)
            if other is not None:
                changed.append((module, name, value))
                setattr(module, name, other)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


class Stopwatch:
    """Seconds by piece: what runs on `device` between the start and the end of each wrapped call."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    def wrap(self, piece: str, function: Callable) -> Callable:
        def timed(*args, **options):
            start = self._mark()
            result = function(*args, **options)
            self._marks.append((piece, start, self._mark()))
            return result

        return timed

    def totals(self) -> dict[str, float]:
        """Return the seconds of each piece since the last call, and forget them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = defaultdict(float)
        for piece, start, end in self._marks:
            seconds[piece] += start.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - start
        self._marks = []
        return seconds

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def breakdown(
    kernel: ModuleType, parameters: Sequence[Parameter], device: torch.device, steps: int
) -> dict[str, float]:
    """Return the milliseconds of our optimizer's step by piece; `rest` is everything else, such as the host's work.

    `square` is the products of two m x m matrices, `newton_schulz` the calls that make all products of an iteration,
    `normalise` the pass that divides by the norm, `small_polar` the launches that do that, too.
    """
    watch = Stopwatch(device)
    select = kernel.kernels.products.select_products

    def timed_products(*args, **options):
        table = select(*args, **options)
        return table._replace(**{field: watch.wrap(PRODUCTS[field], f) for field, f in _products(table).items()})

    pieces = {
        kernel.kernels.native.momentum_pack_: "momentum_pack",
        kernel.kernels.normalization.normalize: "normalise",
        kernel.kernels.native.descend_: "descend",
        kernel.rules.short_vectors.update_joined_: "adamw",
    }
    if kernel.kernels.products.small_polar is not None:
        pieces[kernel.kernels.products.small_polar.small_polar] = "small_polar"
    functions = {function: watch.wrap(piece, function) for function, piece in pieces.items()}
    with replaced(kernel, {**functions, select: timed_products}):
        step = step_of(build_ours(kernel, make_weights(parameters, device)))
        for _ in range(WARM_UP):
            step()
        watch.totals()
        whole = watch.wrap("whole", step)
        for _ in range(steps):
            whole()
        seconds = watch.totals()
    milliseconds = {piece: 1e3 * seconds[piece] / steps for piece in (*PIECES, "whole")}
    return {**milliseconds, "rest": milliseconds["whole"] - sum(milliseconds[piece] for piece in PIECES)}


def host_milliseconds(kernel: ModuleType, parameters: Sequence[Parameter], device: torch.device, steps: int) -> float:
    """Return the shortest time that the host needs for a step of our optimizer, per 100 matrices.

    Products return empty tensors. The matrices are small. Those of all models but `TINY_MODEL` have as many different
    shapes as the original ones. They take separate products even where one launch is known to be faster for matrices of
    their size.
    """
    select, small = kernel.kernels.products.select_products, kernel.kernels.products.small_choice

    def empty_products(*args, **options):
        table = select(*args, **options)
        return table._replace(**{field: EMPTY_PRODUCTS[field] for field in _products(table)})

    shrunk = [
        p._replace(shape=tuple(max(SMALLEST_SIDE, side // SHRINKING) for side in p.rows_and_columns))
        for p in parameters
        if p.matrix
    ]
    with replaced(kernel, {select: empty_products, small: lambda *size: kernel.kernels.speeds.gains.Gain()}):
        step = step_of(build_ours(kernel, make_weights(shrunk, device)))
        seconds = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return 1e3 * min(seconds[WARM_UP:]) * 100 / len(shrunk)


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes that torch's allocator had given out at a moment of one step, less those before the step.

    So parameters, gradients, state, and what earlier steps have kept for later ones are left out, and what this step
    keeps is in it. What a GPU's allocator wastes inside its blocks counts, too. What it reserves beyond
    them does not, nor what libraries take without it. On a CPU torch does not say when memory from before the step is
    given back: there it counts as held to the end.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def launched_kernels(step: Callable[[], None]) -> int:
    """Return how many kernels a step launches on the GPU, without copies and fills."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not e.is_user_annotation and not e.name.startswith(("Memcpy", "Memset")) for e in on_gpu)


def _products(table) -> dict[str, Callable]:
    return {field: value for field, value in table._asdict().items() if callable(value)}
