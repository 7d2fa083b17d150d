"""The user's part: load the kernel from the Hub that the environment names, train with it, and draw what happened.

python -m examples.character_model.experiment [--output out/demo] [--quick]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import figures, report
from .comparison import FULL, QUICK, compare
from .corpus import read_corpus, standard_library
from .loading import Origin, load_by_version_and_commit
from .training import Run

REPO_ID = "org/optimizer"
VERSION = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; proves nothing")
    arguments = parser.parse_args()
    console, plan = Console(), QUICK if arguments.quick else FULL
    # So small a model gains little from a second thread and loses much where other programs want the core, too.
    torch.set_num_threads(1)
    kernel, by_version, by_commit = load_by_version_and_commit(REPO_ID, VERSION)
    show_origin(console, f"version={VERSION}", by_version)
    show_origin(console, f'revision="{by_version.hub_commit}"', by_commit)

    corpus = read_corpus(standard_library())
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=plan.total_steps)

        def advance(run: Run) -> None:
            progress.update(bar, advance=1, description=f"{run.optimizer:5}  lr {run.lr:<5g}  seed {run.seed:<4}")

        comparison = compare(kernel, corpus, plan, advance)

    arguments.output.mkdir(parents=True, exist_ok=True)
    content = report.summary(comparison, corpus, by_version)
    report.write(comparison, content, arguments.output)
    drawn = figures.draw_all(comparison, kernel, arguments.output)
    console.print(report.table(content["results"]))
    console.print(f"In {arguments.output}: summary.json, runs.json, routing.txt; as .png and .svg {', '.join(drawn)}")
    console.print(report.verdict(comparison), style="bold")
    if arguments.quick:
        console.print("This was --quick: so few steps judge neither optimizer.")
    return 0 if arguments.quick or report.is_better(comparison) else 1


def show_origin(console: Console, asked: str, origin: Origin) -> None:
    build = origin.build
    lines = [
        f'[bold]get_kernel("{REPO_ID}", {asked})',
        f"  variant  {build.variant}, {build.kind}, by {build.builder}",
        f"  ops      {build.id}",
        f"  pin      {build.pin}, and all files agree with it",
        f"  source   commit {build.commit}{' with uncommitted changes' if build.dirty else ''}",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
