"""Time the passes before and after the orthogonalization, compiled and in torch's functions (`kernels/portable/`).

    python -m benchmarks.sweep_portable [--build DIR] [--threads N] [--output FILE] [--tiny]

The portable variant has the build's Python files. Both take turns in one process, on the matrices of
`sweep_bookkeeping`. The ratio is the portable time divided by the compiled one: what a platform pays that no compiled
library fits. Results are written row by row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.built_kernel import load_variant
from benchmarks.result_file import UNMEASURED, ResultFile, facts
from benchmarks.sweep_bookkeeping import (
    ALL_CASES,
    CASES,
    DTYPES,
    LR,
    OPERATIONS,
    TINY_CASES,
    WEIGHT_DECAY,
    Numbers,
    descend_with,
    key_of,
    make_batches,
    pack_with,
)
from benchmarks.sweep_options import load, path_of, plain_parser
from benchmarks.timing import Deadline, take_turns
from tests.support.portable_variant import write_portable_variant


def measure(natives: tuple[ModuleType, ModuleType], case: str, dtypes: str, device, rounds: int) -> Iterator[dict]:
    """Yield a row for each operation on the matrices of a case, by the compiled and by the portable operations."""
    batches = make_batches(ALL_CASES[case], *DTYPES[dtypes], device)
    by = Numbers(*(torch.tensor(value, dtype=torch.float64) for value in (LR, WEIGHT_DECAY, 1.0)))
    works = {
        "momentum_pack_": [lambda native=native: pack_with(native, batches) for native in natives],
        "descend_": [lambda native=native: descend_with(native, batches, by) for native in natives],
    }
    for operation, turns in works.items():
        (seconds, spread), (portable, portable_spread) = take_turns(turns, device, rounds)
        named = {"operation": operation, "matrices": case, "dtypes": dtypes}
        timed = {"seconds": seconds, "spread": spread, "portable_seconds": portable, "portable_spread": portable_spread}
        yield {**named, **timed, "ratio": portable / seconds}


def report(rows: list[dict]) -> Table:
    table = Table("case", title="Compiled and portable operations")
    for heading in "compiled ms", "portable ms", "portable / compiled":
        table.add_column(heading, justify="right")
    for row in rows:
        if row["status"] == UNMEASURED:
            table.add_row(row["case"], UNMEASURED)
            continue
        times = (("seconds", "spread"), ("portable_seconds", "portable_spread"))
        shown = [f"{1e3 * row[seconds]:.3f} ±{row[spread]:.0%}" for seconds, spread in times]
        table.add_row(row["case"], *shown, f"{row['ratio']:.2f}")
    return table


def main() -> None:
    parser = plain_parser("Time the compiled operations against the portable ones.")
    arguments = parser.parse_args()
    kernel, device = load(arguments)
    with tempfile.TemporaryDirectory() as folder:
        portable = load_variant(write_portable_variant(Path(kernel.__file__).parent, Path(folder), device.type))
    cases, rounds = (TINY_CASES, 3) if arguments.tiny else (CASES, 15)
    pairs = list(product(cases, DTYPES))
    content = facts(kernel, device, {"rounds": rounds})
    keys = [key_of(operation, *pair) for pair in pairs for operation in OPERATIONS]
    results = ResultFile(path_of("portable", device, arguments), content, keys)
    deadline = Deadline(arguments.minutes)
    for pair in pairs:
        if all(results.is_measured(key_of(operation, *pair)) for operation in OPERATIONS) or deadline.passed():
            continue
        for row in measure((kernel.kernels.native, portable.kernels.native), *pair, device, rounds):
            results.put(key_of(row["operation"], *pair), row)
    Console(width=None if Console().is_terminal else 140).print(report(list(results.rows.values())))


if __name__ == "__main__":
    main()
