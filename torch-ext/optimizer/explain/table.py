"""The table of `explain()` as text and HTML; parameters that look the same in all columns share a line."""

from __future__ import annotations

from html import escape
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence

from ..parameters.routing import Route
from ..parameters.sequences import grouped
from ..rules.fallback_table import FALLBACKS
from .writing import bytes_text, flops_text, joined_names


class Line(NamedTuple):
    """Parameters that differ only in the numbers of their names."""

    name: str
    first: Route
    count: int
    work: Optional[float]  # share of the FLOPs of all lines


class Column(NamedTuple):
    """A column of the table: its heading, the function for its cells, and whether they are numbers."""

    heading: str
    cell: Callable[[Line], Any]
    is_number: bool = False


# `state` and `work` are sums over the parameters of a line; everything else applies to each parameter.
_COLUMNS = (
    Column("name", lambda line: line.name if line.count == 1 else f"{line.name} x {line.count}"),
    Column("shape", lambda line: "x".join(map(str, line.first.shape)) or "scalar"),
    Column("branch", lambda line: line.first.branch),
    Column("reason", lambda line: line.first.reason),
    Column("matrices", lambda line: line.first.matrices, True),
    Column("multiplier", lambda line: ", ".join(map(_cell, line.first.multipliers)) or None, True),
    Column("lr", lambda line: line.first.lr, True),
    Column("decay", lambda line: line.first.weight_decay, True),
    Column("state", lambda line: None if line.first.state_bytes is None else _state_of(line), True),
    Column("work", lambda line: None if line.work is None else f"{line.work:.1%}", True),
    Column("owner", lambda line: line.first.owner, True),
    Column("kernel", lambda line: line.first.kernel),
)

# Translucent colours work on light and dark pages.
_RULE = "1px solid rgba(128,128,128,.4)"
_TINTS = {"muon": "rgba(0,114,178,.14)", **dict.fromkeys(FALLBACKS, "rgba(213,94,0,.12)")}


class Explanation:
    """The routes of all parameters, in `rows`, and the lines below them, in `notes`; printed as a table.

    In print and in notebooks, layers that look the same in all columns share a line. `len` and iteration count rows.
    """

    def __init__(self, rows: Iterable[Route], notes: Iterable[str] = ()):
        self.rows = list(rows)
        self.notes = list(notes)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        # Many rows share few kernels, whose names are long: the table shows numbers, and lines below it the names.
        kernels = list(dict.fromkeys(row.kernel for row in self.rows if row.kernel is not None))
        numbers = {kernel: f"[{number}]" for number, kernel in enumerate(kernels, 1)}
        columns, cells = _filled(self._lines())
        cells = [[numbers.get(cell, cell) for cell in row] for row in cells]
        widths = [max(map(len, column)) for column in zip([column.heading for column in columns], *cells)]
        aligned = [str.rjust if column.is_number else str.ljust for column in columns]
        table = [[column.heading for column in columns], ["-" * width for width in widths], *cells]
        lines = ["  ".join(align(c, w) for align, c, w in zip(aligned, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, *(f"{numbers[k]} {k}" for k in kernels), *self._summary(), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the table for a notebook, without style sheets, scripts or external resources."""
        lines = self._lines()
        columns, cells = _filled(lines)
        head = "".join(_html_cell("th", column, column.heading) for column in columns)
        body = []
        for line, row in zip(lines, cells):
            tds = "".join(_html_cell("td", column, cell) for column, cell in zip(columns, row))
            body.append(f'<tr style="background:{_TINTS[line.first.branch]}">{tds}</tr>')
        table = f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody>'
        below = "".join(f"<p>{escape(text)}</p>" for text in (*self._summary(), *self.notes))
        return f'<div style="overflow-x:auto">{table}</table></div>{below}'

    def _lines(self) -> list[Line]:
        """Return the rows as lines; rows that differ only in the numbers of their names share a line."""
        total = sum(row.flops or 0 for row in self.rows)
        placed = []
        for positions in grouped(range(len(self.rows)), lambda position: self.rows[position][1:]):
            first = self.rows[positions[0]]
            for name, members in joined_names([self.rows[position].name for position in positions]):
                work = None if not first.flops else len(members) * first.flops / total
                placed.append((positions[members[0]], Line(name, first, len(members), work)))
        return [line for _, line in sorted(placed, key=lambda pair: pair[0])]

    def _summary(self) -> list[str]:
        """Return the totals of each branch, and if there is a column `work`, how to read it."""
        muon = [row for row in self.rows if row.branch == "muon"]
        rest = [row for row in self.rows if row.branch != "muon"]
        fallbacks = " and ".join(sorted({FALLBACKS[row.branch].name for row in rest})) or FALLBACKS["adamw"].name
        parameters = "parameter" if len(muon) == 1 else "parameters"
        summary = f"{len(muon)} {parameters} {_amount(muon)} by Muon, {len(rest)} {_amount(rest)} by {fallbacks}"
        flops = sum(row.flops or 0 for row in self.rows)
        reading = f"work: share of the {flops_text(flops)} that orthogonalization takes a step, an estimate"
        return [summary, reading] if flops else [summary]


def _state_of(line: Line) -> str:
    return bytes_text(line.count * line.first.state_bytes)


def _amount(rows: Sequence[Route]) -> str:
    elements = f"{sum(row.elements for row in rows):,} elements"
    if not rows or any(row.state_bytes is None for row in rows):
        return f"({elements})"
    return f"({elements}, {bytes_text(sum(row.state_bytes for row in rows))} of state)"


def _filled(lines: Sequence[Line]) -> tuple[list[Column], list[list[str]]]:
    """Return the columns that are not empty in all lines, and the cells of each line."""
    columns = [column for column in _COLUMNS if any(column.cell(line) is not None for line in lines)]
    return columns, [[_cell(column.cell(line)) for column in columns] for line in lines]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def _html_cell(tag: str, column: Column, text: str) -> str:
    align = "right" if column.is_number else "left"
    style = f"text-align:{align};padding:.2em .6em;border-bottom:{_RULE};white-space:nowrap"
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'
