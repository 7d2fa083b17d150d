"""Count what a warm step of Muon goes through: functions of the package, their files, and changes of file.

    python -m tools.trace.step [--variant PATH]... [--ranks 4] [--walk] [--write]

A step of three matrices and a vector is traced in one process, and on rank 0 of several whose parameters are row
shards, over gloo on this machine. Each `--variant` is a build to trace: its folder, or the one that holds it.

    calls         entries: calls of package functions, and resumptions of its generators
    functions     distinct functions
    files         distinct files
    changes       entries into another file than the entry before: how often a reader who follows the calls turns a page
    with returns  the same, where coming back to the caller also counts
    nesting       the most package functions inside each other

The processor decides which products the iteration uses, and Python 3.12 counts fewer functions, because comprehensions
are no longer functions there. So compare builds on one machine. `--walk` lists the stays in order: a file and the
functions entered before another file, indented by the depth of the first. `--write` puts the table into
docs/architecture.md.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu_name
from benchmarks.variants import chosen_variants
from tools.pages import markdown
from tools.trace.traced_step import trace_variant
from tools.trace.tracer import Trace

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "step-trace.json"
PAGE = ROOT / "docs" / "architecture.md"
HEADINGS = ("build", "processes", "calls", "functions", "files", "changes", "with returns", "nesting")


def cells(label: str, ranks: int, trace: Trace) -> tuple[str, ...]:
    """Return the row of one trace."""
    counts = trace.calls, len(trace.functions), trace.files, trace.changes, trace.switches, trace.nesting
    return label, str(ranks), *map(str, counts)


def walk(trace: Trace) -> Iterator[str]:
    """Yield a line for each stay: its functions, each once, in the order of first entry, with the number of entries."""
    for number, stay in enumerate(trace.stays, 1):
        counts = Counter(name.replace(".<locals>", "") for name in stay.functions)
        names = ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())
        yield f"{number:4} {'  ' * stay.depth}{stay.file}: {names}"


def filled(page: str, results: Mapping) -> str:
    """Return the page with a new table between its markers."""
    return markdown.fill(page, {"trace": markdown.table(HEADINGS, results["rows"], numbers=True)})


def report(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return the table for a terminal."""
    table = Table(HEADINGS[0], title="A warm step of three matrices and a vector")
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", type=Path, action="append", help="a build to trace; by default the one in build/")
    parser.add_argument("--ranks", type=int, default=4, help="processes of the second trace: %(default)s; 1: none")
    parser.add_argument("--walk", action="store_true", help="list the stays as well")
    parser.add_argument("--write", action="store_true", help="renew the results and the table of docs/")
    options = parser.parse_args(arguments)
    try:
        variants = chosen_variants(options.variant)
    except FileNotFoundError as error:
        parser.error(str(error))
    console = Console(width=None if Console().is_terminal else 120)
    rows = []
    for label, folder in variants.items():
        for ranks in dict.fromkeys((1, options.ranks)):
            trace = trace_variant(folder, ranks)
            rows.append(cells(label, ranks, trace))
            if options.walk:
                lines = (f"{label}, processes: {ranks}", *walk(trace), "")
                console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(report(rows))
    if options.write:
        results = {"processor": cpu_name(), "python": platform.python_version(), "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(filled(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
