"""Time the passes before and after the orthogonalization against the `torch._foreach_*` sequences that do the same.

    python -m benchmarks.sweep_bookkeeping [--build DIR] [--device cpu] [--threads N] [--minutes N] [--output FILE]
        [--tiny]

Bytes that must move, for n elements: `momentum_pack_` reads momentum and gradient and writes momentum and packed, n (2
momentum + gradient + packed); `descend_` reads and writes parameters and reads updates, n (2 parameter + update). Each
name stands for the bytes of its dtype. The bound is the bandwidth of a copy of as many bytes, at most COPY_BYTES, in
the same run. Copy, ours and foreach take turns, so that all run under the same conditions. On a CPU the share may
exceed 100 %: memory that a copy overwrites is first read into the cache, while memory that is updated in place is
already there.

Matrices of one shape are one call. Tall ones join the batch of wide ones that have the transposed shape.

Results are written row by row, and a second run with the same `--output` continues the first one.
The row of a case that raises has the error, and a later run tries it last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, product

import torch
from torch import Tensor

from benchmarks.result_file import ResultFile, facts, has_error
from benchmarks.sweep_options import load, measure_cases, path_of, plain_parser
from benchmarks.terminal import print_results
from benchmarks.timing import Deadline, take_turns

BETA, LR, WEIGHT_DECAY = 0.95, 0.02, 0.1

# Larger than the caches of every processor we know.
COPY_BYTES = 1 << 28

Shape = tuple[int, int]
GPT2 = [(2304, 768)] * 12 + [(768, 768)] * 12 + [(3072, 768)] * 12 + [(768, 3072)] * 12
CASES = {
    "GPT-2 124M, 48": GPT2,
    "128 x 128, 64": [(128, 128)] * 64,
    "1024 x 1024, 8": [(1024, 1024)] * 8,
    "4096 x 4096, 1": [(4096, 4096)],
}
TINY_CASES = {"tiny, 6": [(32, 16), (16, 16), (16, 32)] * 2}
ALL_CASES = {**CASES, **TINY_CASES}
OPERATIONS = ("momentum_pack_", "descend_")
DTYPES = {
    "float32 / bfloat16": (torch.float32, torch.bfloat16),
    "float32 / float16": (torch.float32, torch.float16),
    "bfloat16 / bfloat16": (torch.bfloat16, torch.bfloat16),
}


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape up to transposition, and the buffer (B, rows, cols), wide, that they share."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    momentum: list[Tensor]
    packed: Tensor


@dataclass(frozen=True)
class Numbers:
    """The arguments of `descend_` that are tensors on the CPU."""

    lr: Tensor
    weight_decay: Tensor
    multiplier: Tensor


@dataclass(frozen=True)
class Result:
    """One row. Seconds are medians; a spread is half the distance of the quartiles divided by the median."""

    operation: str
    matrices: str
    dtypes: str
    bytes: int
    seconds: float
    spread: float
    foreach_seconds: float
    foreach_spread: float
    copy_seconds: float
    copied_bytes: int

    @property
    def share_of_copy(self) -> float:
        """The bandwidth divided by that of the copy."""
        return (self.bytes / self.seconds) / (self.copied_bytes / self.copy_seconds)

    @property
    def speed_up(self) -> float:
        """The time of the foreach sequence divided by ours."""
        return self.foreach_seconds / self.seconds


def make_batches(shapes: list[Shape], dtype, packed_dtype, device) -> list[Batch]:
    by_shape: dict[Shape, list[Shape]] = {}
    for shape in shapes:
        by_shape.setdefault((min(shape), max(shape)), []).append(shape)
    return [make_batch(wide, members, dtype, packed_dtype, device) for wide, members in by_shape.items()]


def make_batch(wide: Shape, members: list[Shape], dtype, packed_dtype, device) -> Batch:
    def tensors() -> list[Tensor]:
        made = (torch.randn(shape, device=device).to(dtype) for shape in members)
        return [x if x.shape == wide else x.mT for x in made]

    return Batch(tensors(), tensors(), tensors(), torch.zeros(len(members), *wide, dtype=packed_dtype, device=device))


def pack_with_foreach(batches: list[Batch]) -> None:
    for b in batches:
        torch._foreach_lerp_(b.momentum, b.gradients, 1 - BETA)
        updates = torch._foreach_lerp(b.gradients, b.momentum, BETA)
        torch._foreach_copy_(list(b.packed.unbind()), updates)


def descend_with_foreach(batches: list[Batch]) -> None:
    for b in batches:
        torch._foreach_mul_(b.parameters, 1 - LR * WEIGHT_DECAY)
        torch._foreach_add_(b.parameters, list(b.packed.unbind()), alpha=-LR)


def pack_with(native, batches: list[Batch]) -> None:
    for b in batches:
        native.momentum_pack_(b.momentum, b.gradients, b.packed, BETA, True)


def descend_with(native, batches: list[Batch], by: Numbers) -> None:
    for b in batches:
        native.descend_(b.parameters, b.packed, by.lr, by.weight_decay, by.multiplier)


def bytes_moved(batches: list[Batch]) -> dict[str, int]:
    pack = descend = 0
    for b in batches:
        wide, narrow = (t.element_size() * t.numel() for t in (torch.stack(b.parameters), b.packed))
        pack += 3 * wide + narrow
        descend += 2 * wide + narrow
    return {"momentum_pack_": pack, "descend_": descend}


def measure(native, case: str, dtypes: str, device: torch.device, rounds: int) -> Iterator[Result]:
    """Yield a row for each operation on the matrices of a case."""
    batches = make_batches(ALL_CASES[case], *DTYPES[dtypes], device)
    by = Numbers(*(torch.tensor(value, dtype=torch.float64) for value in (LR, WEIGHT_DECAY, 1.0)))
    works = {
        "momentum_pack_": (lambda: pack_with(native, batches), lambda: pack_with_foreach(batches)),
        "descend_": (lambda: descend_with(native, batches, by), lambda: descend_with_foreach(batches)),
    }
    for operation, moved in bytes_moved(batches).items():
        source = torch.zeros(min(moved, COPY_BYTES) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = lambda target=target, source=source: target.copy_(source)  # noqa: E731
        ours, foreach, copying = take_turns([*works[operation], copy], device, rounds)
        timings = *ours, *foreach, copying[0], 2 * source.numel()
        yield Result(operation, case, dtypes, moved, *timings)


def key_of(operation: str, case: str, dtypes: str) -> str:
    return f"{operation}: {case}, {dtypes}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = plain_parser("Time momentum_pack_ and descend_ against foreach.").parse_args(arguments)
    kernel, device = load(options)
    cases, rounds = (TINY_CASES, 3) if options.tiny else (CASES, 15)
    keys = {pair: [key_of(operation, *pair) for operation in OPERATIONS] for pair in product(cases, DTYPES)}
    content = facts(kernel, device, {"rounds": rounds})
    results = ResultFile(path_of("bookkeeping", device, options), content, [*chain(*keys.values())])

    def measured(case: str, dtypes: str) -> Iterator[tuple[str, dict]]:
        for r in measure(kernel.kernels.native, case, dtypes, device, rounds):
            row = {**asdict(r), "share_of_copy": r.share_of_copy, "speed_up": r.speed_up}
            yield key_of(r.operation, case, dtypes), row

    works = {tuple(of): partial(measured, *pair) for pair, of in keys.items()}
    measure_cases(results, works, Deadline(options.minutes))
    rows = list(results.rows.values())
    print_results(rows)
    return int(any(map(has_error, rows)))


if __name__ == "__main__":
    sys.exit(main())
