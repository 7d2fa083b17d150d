"""Stage 5: the report as a file, on the terminal and as figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Drawn

from benchmarks.result_file import slug
from tools.lab.items import STAGES
from tools.lab.records import Records
from tools.pages.lab_tables import lab_tables
from tools.pages.tables import Table


def write_report(records: Records, folder: Path, date: str) -> int:
    """Write `<device>-<date>.json` and figures into `folder`, print the tables; return how many items failed."""
    content = report(records, date)
    file = folder / f"{slug(records.identity['device'])}-{date}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    show(list(lab_tables(content)))
    try:
        # Imported here, because the report must work without matplotlib.
        from tools.lab.figures import draw
    except ModuleNotFoundError as missing:
        print(f"no figures are drawn: {missing.name} is not installed")
    else:
        for figure in draw(content, file.with_suffix("")):
            print(f"drawn: {figure}")
    print(f"written: {file}")
    return sum(record.status == "failed" for record in records.all)


def report(records: Records, date: str) -> dict:
    """Return the whole report: device, versions and date, then the records of each stage."""
    stages = {name: [asdict(record) for record in records.of(name).values()] for name in STAGES}
    return {"lab": records.identity, "date": date, "stages": {name: rows for name, rows in stages.items() if rows}}


def show(tables: list[Table]) -> None:
    """Print tables."""
    console = Console(width=None if Console().is_terminal else 160)
    for table in tables:
        drawn = Drawn(*table.headings, title=table.title)
        for row in table.rows:
            drawn.add_row(*map(escape, row))
        console.print(drawn)
