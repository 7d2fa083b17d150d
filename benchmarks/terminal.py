"""What a sweep has measured, in the terminal: the tables that docs/performance.md has, then what has no results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import rich.table
from rich.console import Console
from rich.markup import escape

from benchmarks.result_file import has_results
from tools.pages.columns import words
from tools.pages.tables import Table, sweep_tables

# Columns of text where the output is no terminal.
WIDTH = 230


def print_results(rows: Sequence[dict], name: str = "Results") -> None:
    """Print the tables of rows as their sweep writes them, and a line for each row without results.

    `name` is the sweep's, for the title of a contest.
    """
    console = open_console()
    for table in sweep_tables({"results": [row for row in rows if has_results(row)]}, name):
        console.print(drawn(table))
    for table in errors(rows):
        console.print(drawn(table))
    for row in rows:
        if not has_results(row):
            console.print(f"{row['case']}: {row['status']}", markup=False)


def errors(rows: Sequence[dict]) -> Iterator[Table]:
    """Yield the table of each contestant's error, of a contest: who is fast may be wrong."""
    raced = {
        row["case"]: {name: outcome for name, outcome in row["contestants"].items() if isinstance(outcome, dict)}
        for row in rows
        if "contestants" in row
    }
    names = list(dict.fromkeys(name for outcomes in raced.values() for name in outcomes))
    if names:
        cells = [[words(outcomes[n]["error"]) if n in outcomes else "" for n in names] for outcomes in raced.values()]
        yield Table("Errors", ("case", *names), [(case, *row) for case, row in zip(raced, cells)])


def open_console() -> Console:
    """Return a console with room for a table where there is no terminal to ask for its width."""
    return Console(width=None if Console().is_terminal else WIDTH)


def drawn(table: Table) -> rich.table.Table:
    """Return a table as rich draws it, numbers to the right."""
    result = rich.table.Table(title=escape(table.title))
    for heading, cells in zip(table.headings, zip(*table.rows)):
        result.add_column(escape(heading), justify="right" if all(map(is_number, filter(None, cells))) else "left")
    for cells in table.rows:
        result.add_row(*map(escape, cells))
    return result


def is_number(cell: str) -> bool:
    return cell[0].isdigit() and " x " not in cell
