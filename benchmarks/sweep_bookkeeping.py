"""Time the passes before and after the orthogonalization against the `torch._foreach_*` sequences that do the same.

    python -m benchmarks.sweep_bookkeeping [--build DIR] [--tiny] [--threads N] [--json FILE]

Bytes that must move, for n elements: `momentum_pack_` reads momentum and gradient, writes momentum and packed,
n (2 momentum + gradient + packed); `descend_` reads and writes parameters and reads updates, n (2 parameter + update);
each dtype stands for its bytes. The bound is the bandwidth of a copy of as many bytes, at most COPY_BYTES, in the
same run. Copy, ours and foreach take turns, so that all see the same machine. On a CPU the share may exceed 100 %: what
a copy overwrites is first read into the cache, what is updated in place is there already.

Matrices of one shape are one call; tall ones join the batch of the wide ones that are their transposes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.built_kernel import load_built
from benchmarks.machine import describe
from benchmarks.timing import take_turns

ROOT = Path(__file__).resolve().parent.parent
BETA, LR, WEIGHT_DECAY = 0.95, 0.02, 0.1

# Past the caches of every processor we know.
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
    """What `descend_` takes as tensors on the CPU."""

    lr: Tensor
    weight_decay: Tensor
    multiplier: Tensor


@dataclass(frozen=True)
class Result:
    """One row: seconds are medians, spreads half the distance of the quartiles as a share of the median."""

    operation: str
    case: str
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
        """Bandwidth over that of the copy."""
        return (self.bytes / self.seconds) / (self.copied_bytes / self.copy_seconds)

    @property
    def speed_up(self) -> float:
        """Time of the foreach sequence over ours."""
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


def measure(native, case: str, shapes: list[Shape], dtypes: str, device: torch.device, rounds: int) -> list[Result]:
    batches = make_batches(shapes, *DTYPES[dtypes], device)
    by = Numbers(*(torch.tensor(value, dtype=torch.float64) for value in (LR, WEIGHT_DECAY, 1.0)))
    works = {
        "momentum_pack_": (lambda: pack_with(native, batches), lambda: pack_with_foreach(batches)),
        "descend_": (lambda: descend_with(native, batches, by), lambda: descend_with_foreach(batches)),
    }
    results = []
    for operation, moved in bytes_moved(batches).items():
        source = torch.zeros(min(moved, COPY_BYTES) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = lambda target=target, source=source: target.copy_(source)  # noqa: E731
        ours, foreach, copying = take_turns([*works[operation], copy], device, rounds)
        timings = *ours, *foreach, copying[0], 2 * source.numel()
        results.append(Result(operation, case, dtypes, moved, *timings))
    return results


def report(results: list[Result]) -> Table:
    table = Table("operation", "matrices", "parameters / packed", title="Bookkeeping of a step")
    for heading in "MB", "ms", "foreach ms", "GB/s", "of copy", "foreach / ours":
        table.add_column(heading, justify="right")
    for r in results:
        ours = f"{1e3 * r.seconds:.3f} ±{r.spread:.0%}"
        foreach = f"{1e3 * r.foreach_seconds:.3f} ±{r.foreach_spread:.0%}"
        rates = f"{r.bytes / r.seconds / 1e9:.1f}", f"{r.share_of_copy:.0%}", f"{r.speed_up:.2f}"
        table.add_row(r.operation, r.case, r.dtypes, f"{r.bytes / 1e6:.1f}", ours, foreach, *rates)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Time momentum_pack_ and descend_ against foreach.")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="what tools.build.variants has made")
    parser.add_argument("--tiny", action="store_true", help="small matrices and few rounds, to see that it runs")
    parser.add_argument("--threads", type=int, help="of the CPU; use 1 where other work keeps a core busy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results with versions and device")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    kernel, device = load_built(arguments.build)
    cases, rounds = (TINY_CASES, 3) if arguments.tiny else (CASES, 15)
    results = []
    for case, shapes in cases.items():
        for dtypes in DTYPES:
            results += measure(kernel.kernels.native, case, shapes, dtypes, device, rounds)
    Console(width=None if Console().is_terminal else 140).print(report(results))
    if arguments.json:
        rows = [{**asdict(r), "share_of_copy": r.share_of_copy, "speed_up": r.speed_up} for r in results]
        arguments.json.write_text(json.dumps({**describe(kernel, device), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
