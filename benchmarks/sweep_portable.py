"""Time the passes before and after the orthogonalization, compiled and in torch's functions (`kernels/portable/`).

    python -m benchmarks.sweep_portable [--build DIR] [--device cpu] [--threads N] [--minutes N] [--output FILE]
        [--tiny]

The portable variant has the build's Python files. Both take turns in one process, on the matrices of
`sweep_bookkeeping`. The ratio is the portable time divided by the compiled one: the price on a platform for which no
compiled library exists.

Results are written row by row. The row of a case that raises has the error, and a later run tries it last.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.built_kernel import load_variant
from benchmarks.result_file import ResultFile, facts, has_error
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
from benchmarks.sweep_options import load, measure_cases, path_of, plain_parser
from benchmarks.terminal import print_results
from benchmarks.timing import Deadline, take_turns
from tests.support.portable_variant import write_portable_variant


def measure(
    natives: tuple[ModuleType, ModuleType], case: str, dtypes: str, device: torch.device, rounds: int
) -> Iterator[tuple[str, dict]]:
    """Yield a key and a row for each operation on the matrices of a case, by the compiled and the portable ones."""
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
        yield key_of(operation, case, dtypes), {**named, **timed, "ratio": portable / seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    options = plain_parser("Time the compiled operations against the portable ones.").parse_args(arguments)
    kernel, device = load(options)
    with tempfile.TemporaryDirectory() as folder:
        portable = load_variant(write_portable_variant(Path(kernel.__file__).parent, Path(folder), device.type))
    natives = kernel.kernels.native, portable.kernels.native
    cases, rounds = (TINY_CASES, 3) if options.tiny else (CASES, 15)
    keys = {pair: tuple(key_of(operation, *pair) for operation in OPERATIONS) for pair in product(cases, DTYPES)}
    content = facts(kernel, device, {"rounds": rounds})
    results = ResultFile(path_of("portable", device, options), content, [*chain(*keys.values())])
    works = {of: partial(measure, natives, *pair, device, rounds) for pair, of in keys.items()}
    measure_cases(results, works, Deadline(options.minutes))
    rows = list(results.rows.values())
    print_results(rows)
    return int(any(map(has_error, rows)))


if __name__ == "__main__":
    sys.exit(main())
