"""Compile every launch of the Triton kernels for GPUs that this machine does not have, and refuse bad ones.

    python -m tools.lint.kernels [--fast] [--json FILE | --all-triton] [--package DIR]

A launch is refused unless it compiles, fits into shared memory and registers, multiplies each part of a tile once, uses
only matrix instructions that its dtype allows, and loads by tensor descriptors if it has them. The launches that are
chosen without a measurement must spill no register. What would make others slow is also named (`judgements.py` has the
limits). That a launch is fast, or right, is not shown.
"""

from __future__ import annotations

import argparse
import json
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
from tools.lint.judgements import (
    ANY_MATRIX,
    LIMITS,
    blocks,
    drawbacks,
    flops_per_byte,
    issue_share,
    problems,
    products,
    spills,
)
from tools.lint.triton_versions import VERSIONS, lint_under
from tools.lint.waves import wave_table

# The columns: of the launch, of what it needs, and of its main loop. For the loop: products in flight at its wait,
# products with an operand from registers, loads and stores of shared memory, barriers, issue clocks over tensor clocks,
# FLOPs per loaded byte.
COLUMNS = (
    *("tile", "warps", "stages"),
    *("shared KiB", "blocks", "regs", "spilled", "matrix", "TMA", "work", "store"),
    *("flight", "from regs", "LDS", "bars", "issue", "FLOP/B"),
)


class Row(NamedTuple):
    """A compiled case, its facts (None if it did not compile), what is wrong with it, and what makes it slow."""

    case: AnyCase
    facts: Optional[Facts]
    problems: list[str]
    drawbacks: list[str]


def examine(package: Path, case: AnyCase) -> Row:
    """Compile one case and judge it."""
    try:
        facts = read_facts(case.compile(package))
    except Exception as error:  # Triton's passes raise errors of any class
        return Row(case, None, [f"does not compile: {type(error).__name__}: {str(error)[:200]}"], [])
    slow = list(spills(facts)) if case.competes else []
    slow += drawbacks(case, facts) if case.promises_speed(package) else []
    return Row(case, facts, list(problems(case, facts, case.takes_descriptors(package))), slow)


def examine_all(package: Path, cases: Sequence[AnyCase], jobs: Optional[int] = None) -> list[Row]:
    """Examine all cases in separate processes, in which Triton compiles and does not interpret."""
    pool = ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with pool:
            return list(pool.map(partial(examine, package), cases, chunksize=2))
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def table(rows: Sequence[Row]) -> Table:
    """Return a table with a line for each launch. Figures of the main loop are for one pass."""
    result = Table("GPU", "launch", title=f"{len(rows)} launches compiled by triton {triton.__version__}")
    for heading in COLUMNS:
        result.add_column(heading, justify="right")
    result.add_column("verdict")
    for row in rows:
        case, facts = row.case, row.facts
        shape = "×".join(map(str, case.parts)), *map(str, case.config[3:])
        figures = (*_needs(case, facts), *_loop_figures(case, facts)) if facts else ["-"] * (len(COLUMNS) - len(shape))
        result.add_row(case.gpu, case.name, *shape, *figures, _verdict(row))
    return result


def _verdict(row: Row) -> str:
    remarks = [escape(problem) for problem in row.problems] + [f"slow: {escape(reason)}" for reason in row.drawbacks]
    return ("[red]" if row.problems else "[yellow]" if remarks else "") + ("; ".join(remarks) or "passes")


def _needs(case: AnyCase, facts: Facts) -> tuple[str, ...]:
    shared = f"{facts.shared / 1024:.0f}/{LIMITS[case.gpu].shared >> 10}"
    held = "-" if case.gpu.startswith("gfx") else str(blocks(case, facts))
    counts = facts.registers, facts.spilled, facts.count(ANY_MATRIX), facts.count("UTMALDG")
    bits = "-" if facts.store_bits is None else str(facts.store_bits)
    return (shared, held, *map(str, counts), f"{products(case, facts):g}×", bits)


def _loop_figures(case: AnyCase, facts: Facts) -> tuple[str, ...]:
    loop, share = facts.loop, issue_share(case, facts)
    counts = (loop.in_flight, loop.from_registers, loop.shared_accesses, loop.barriers) if loop else [None] * 4
    issue = "-" if share is None else f"{share:.2f}"
    return (*("-" if count is None else str(count) for count in counts), issue, f"{flops_per_byte(case):g}")


def wave_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield the model of waves for each tile size, with the fewest blocks of its launches that sm_90 holds."""
    wanted = "symmetric_gemm", "sm_90", "bfloat16"
    chosen = [row for row in rows if row.facts and not row.case.competes]
    sm_90 = [row for row in chosen if (row.case.kernel, row.case.gpu, row.case.dtype) == wanted]
    for tile in sorted({row.case.config[0] for row in sm_90}, reverse=True):
        yield wave_table(tile, min(blocks(row.case, row.facts) for row in sm_90 if row.case.config[0] == tile))


def write_json(file: Path, rows: Sequence[Row]) -> None:
    """Write the rows to `file`, with the counts that the table shows."""
    content = [_written(row) for row in rows]
    file.write_text(json.dumps({"triton": triton.__version__, "launches": content}, indent=1) + "\n")


def _written(row: Row) -> dict:
    judged = {"kernel": row.case.kernel, **row.case._asdict(), "problems": row.problems, "drawbacks": row.drawbacks}
    if row.facts is None:
        return judged
    loop = row.facts.loop._replace(opcodes={})._asdict() if row.facts.loop else None
    figures = {"flops_per_byte": flops_per_byte(row.case), "issue_share": issue_share(row.case, row.facts)}
    return judged | {"facts": row.facts._replace(opcodes={}, loop=loop)._asdict() | figures}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for every GPU and judge the result.")
    parser.add_argument("--fast", action="store_true", help="a few launches for sm_80, sm_90 and sm_100")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    one.add_argument("--all-triton", action="store_true", help=f"under triton {', '.join(VERSIONS)}, one by one")
    parser.add_argument("--package", type=Path, default=PACKAGE, help="folder with kernels/; default: %(default)s")
    arguments = parser.parse_args()
    if not (arguments.package / "kernels").is_dir():
        parser.error(f"{arguments.package} has no folder kernels")
    if arguments.all_triton:
        passed = ["--package", arguments.package.resolve(), *(["--fast"] if arguments.fast else [])]
        # A list, so that all of them run; any(), because a killed process has a negative status.
        return int(any([lint_under(version, passed) for version in VERSIONS]))
    rows = examine_all(arguments.package, (fast_cases if arguments.fast else all_cases)(arguments.package))
    console = Console(width=None if sys.stdout.isatty() else 240)
    console.print(table(rows), *wave_tables(rows))
    if arguments.json:
        write_json(arguments.json, rows)
    failed = sum(bool(row.problems) for row in rows)
    slow = sum(bool(row.drawbacks) for row in rows)
    console.print(f"triton {triton.__version__}: {len(rows)} launches, {failed} refused, {slow} slow")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
