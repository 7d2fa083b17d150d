"""Compile every launch of the Triton kernels for GPUs that are not here, and refuse what would run badly or not at all.

    python -m tools.lint.kernels [--fast] [--json FILE] [--all-triton] [--package DIR]

A launch passes if it compiles, fits into shared memory, spills no register, multiplies each part of a tile once, with
the matrix instructions that its dtype may use, and loads by tensor descriptors where it is given them. That it is
fast, or right, is not shown.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

import triton
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.lint.binary import Facts, read_facts
from tools.lint.cases import AnyCase, all_cases, fast_cases
from tools.lint.compiled import PACKAGE
from tools.lint.triton_versions import VERSIONS, lint_under
from tools.lint.waves import blocks_per_sm, wave_table


class Limits(NamedTuple):
    """Bytes of shared memory that a block and a multiprocessor have, and the matrix instructions for 16 bits."""

    shared: int
    shared_of_sm: int
    matrix: str


LIMITS = {
    "sm_80": Limits(163 << 10, 164 << 10, "HMMA"),
    "sm_90": Limits(227 << 10, 228 << 10, "HGMMA"),
    "sm_100": Limits(227 << 10, 228 << 10, "UTCHMMA"),
    "sm_120": Limits(99 << 10, 100 << 10, "HMMA"),
    "gfx942": Limits(64 << 10, 64 << 10, "v_mfma_f32_"),
}
ANY_MATRIX = "HMMA|HGMMA|UTC.?.?MMA|v_mfma_"
AMD_EXACT = r"v_mfma_f32_\w+_f32$"
SPILLS = "LDL|STL|scratch_load|scratch_store"
STORES = "STG|UTMASTG|global_store|buffer_store"


class Row(NamedTuple):
    """A compiled case, what it is, and what is wrong with it; without facts it did not compile."""

    case: AnyCase
    facts: Optional[Facts]
    problems: list[str]


def examine(package: Path, case: AnyCase) -> Row:
    """Compile one case and judge it."""
    try:
        facts = read_facts(case.compile(package))
    except Exception as error:  # Triton's passes raise errors of any class
        return Row(case, None, [f"does not compile: {type(error).__name__}: {str(error)[:200]}"])
    return Row(case, facts, list(problems(case, facts, case.takes_descriptors(package))))


def problems(case: AnyCase, facts: Facts, descriptors: bool) -> Iterator[str]:
    """Yield why a compiled case must not be shipped; `descriptors`: its operands come through tensor descriptors."""
    limits = LIMITS[case.gpu]
    if facts.shared > limits.shared:
        yield f"needs {facts.shared} bytes of shared memory, a block has {limits.shared}"
    if facts.spilled or facts.count(SPILLS):
        yield f"spills {facts.spilled} bytes of registers by {facts.count(SPILLS)} instructions"
    if not facts.count(STORES):
        yield "stores nothing: the compiler gave up and left a stub"
    # The instructions of whole groups of warps multiply 64 rows or more.
    matrix = limits.matrix if case.parts[0] >= 64 else ANY_MATRIX
    if case.dtype != "float32" and not facts.count(matrix):
        yield f"has no matrix instruction {matrix}"
    if case.dtype == "float32" and (facts.count(ANY_MATRIX) != facts.count(AMD_EXACT)):
        yield "multiplies float32 by matrix instructions that round it"
    if descriptors and facts.count("UTMALDG") < 2:
        yield f"loads two operands by {facts.count('UTMALDG')} descriptor loads"
    if facts.specialized:
        yield "gives warps different work, which no configuration asks for"
    if not case.products[0] <= products(case, facts) <= case.products[1]:
        yield f"multiplies {products(case, facts) / case.products[0]:g} times what a tile needs"


def products(case: AnyCase, facts: Facts) -> float:
    """Return how many products of tiles stand in loops."""
    return facts.work / math.prod(case.parts)


def examine_all(package: Path, cases: Sequence[AnyCase], jobs: Optional[int] = None) -> list[Row]:
    """Examine all cases in processes of their own, for which Triton is not an interpreter."""
    pool = ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with pool:
            return list(pool.map(partial(examine, package), cases, chunksize=2))
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def blocks(row: Row) -> int:
    """Return how many blocks of an NVIDIA kernel run on one multiprocessor at once."""
    shared_of_sm = LIMITS[row.case.gpu].shared_of_sm
    return blocks_per_sm(row.facts.shared, row.facts.registers, row.case.config[3], shared_of_sm)


def table(rows: Sequence[Row]) -> Table:
    """Return what was compiled, a line each."""
    result = Table("GPU", "launch", title=f"{len(rows)} launches compiled by triton {triton.__version__}")
    for heading in ("tile", "warps", "stages", "shared KiB", "regs", "spilled", "matrix", "TMA", "work"):
        result.add_column(heading, justify="right")
    result.add_column("verdict")
    for case, facts, faults in rows:
        shape = "×".join(map(str, case.parts)), *map(str, case.config[3:])
        verdict = "[red]" + escape("; ".join(faults)) if faults else "passes"
        result.add_row(case.gpu, case.name, *shape, *(_figures(case, facts) if facts else ["-"] * 6), verdict)
    return result


def _figures(case: AnyCase, facts: Facts) -> tuple[str, ...]:
    shared = f"{facts.shared / 1024:.0f}/{LIMITS[case.gpu].shared >> 10}"
    counts = facts.registers, facts.spilled, facts.count(ANY_MATRIX), facts.count("UTMALDG")
    return (shared, *map(str, counts), f"{products(case, facts):g}×")


def wave_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield the model of waves for each size of tile, with the fewest blocks of its launches that sm_90 holds."""
    wanted = "symmetric_gemm", "sm_90", "bfloat16"
    sm_90 = [row for row in rows if row.facts and (row.case.kernel, row.case.gpu, row.case.dtype) == wanted]
    for tile in sorted({row.case.config[0] for row in sm_90}, reverse=True):
        yield wave_table(tile, min(blocks(row) for row in sm_90 if row.case.config[0] == tile))


def write_json(file: Path, rows: Sequence[Row]) -> None:
    """Write the rows to `file`, with the counts that the table shows."""
    content = [
        {"kernel": row.case.kernel, **row.case._asdict(), "problems": row.problems}
        | ({"facts": row.facts._replace(opcodes={})._asdict()} if row.facts else {})
        for row in rows
    ]
    file.write_text(json.dumps({"triton": triton.__version__, "launches": content}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for every GPU and judge the result.")
    parser.add_argument("--fast", action="store_true", help="a few launches for sm_80, sm_90 and sm_100")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    parser.add_argument("--all-triton", action="store_true", help=f"under triton {', '.join(VERSIONS)}, one by one")
    parser.add_argument("--package", type=Path, default=PACKAGE, help="folder with kernels/; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.all_triton:
        passed = ["--package", arguments.package.resolve(), *(["--fast"] if arguments.fast else [])]
        # A list, so that all run; any, because a process that was killed has a negative status.
        return int(any([lint_under(version, "tools.lint.kernels", passed) for version in VERSIONS]))
    rows = examine_all(arguments.package, (fast_cases if arguments.fast else all_cases)(arguments.package))
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table(rows), *wave_tables(rows))
    if arguments.json:
        write_json(arguments.json, rows)
    failed = sum(bool(row.problems) for row in rows)
    console.print(f"triton {triton.__version__}: {len(rows)} launches, {failed} refused")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
