"""Attack the delivery of the package, and print for each group of attacks how many were tried and survived.

    python -m tools.attacks            writes docs/attacks.md, too, unless --check is given or the pin
                                       did not stop an attack

Survived means: no foreign code ran, and what was loaded is what was published, or nothing. Status 1 if with the pin
one attack was not survived; each such one is named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.attacks.groups import GROUPS, Attack
from tools.attacks.page import PAGE, results, row, write
from tools.build.source_tree import read_revision

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="do not write docs/attacks.md")
    check, console = parser.parse_args().check, Console()
    revision = read_revision(ROOT, ())
    attacks = list(run(console))
    summary = results(attacks, revision)
    console.print(table(summary))
    misses = [attack for attack in attacks if not attack.survived]
    for miss in misses:
        console.print(f"[red]not survived:[/red] {miss.group}: {miss.name}: ", end="")
        console.print(miss.message, markup=False)
    if not check and not misses:
        write(summary)
        console.print(f"written: {PAGE}")
    return int(bool(misses))


def run(console: Console) -> Iterator[Attack]:
    for group in GROUPS:
        with tempfile.TemporaryDirectory() as folder, console.status(f"{group.__doc__.splitlines()[0]}"):
            yield from group(Path(folder))


def table(summary: dict) -> Table:
    shown = Table("group", "tried", "survived with the pin", "survived without", title="Attacks on the delivery")
    for column in shown.columns[1:]:
        column.justify = "right"
    for group, counted in summary["groups"].items():
        shown.add_row(*row(group, counted), style="" if counted["survived"] == counted["tried"] else "red")
    return shown


if __name__ == "__main__":
    sys.exit(main())
