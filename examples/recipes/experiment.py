"""Train with every recipe, two processes at a time, and write what they reach into one file.

python -m examples.recipes.experiment [--output FILE] [--peers DIR] [--quick]

The environment names the Hub. A second run of the same day, or with the same --output, goes on where the first one
ended. A recipe whose package is missing is marked so. What --quick finds is written only where --output says.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers import MissingError, add_folder
from benchmarks.result_file import ResultFile, default_path, facts

from ..character_model.experiment import REPO_ID, VERSION
from .contenders import BASELINE, CONTENDERS, PARAMETRIZATIONS, WIDTHS
from .trials import FULL, QUICK, Job, Size, corpus, load, work

PROCESSES = 2


def parsed_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file; by default in benchmarks/results/training")
    parser.add_argument("--peers", type=Path, help="a folder with timm in it (requirements/benchmark.txt)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; proves nothing")
    arguments = parser.parse_args()
    if arguments.peers is not None and not arguments.peers.is_dir():
        parser.error(f"--peers needs a folder, got {arguments.peers}")
    return arguments


def output_of(arguments: argparse.Namespace, topic: str) -> Path | None:
    """Return where results go: with --quick nowhere unless it is said, since a page is made of the newest results."""
    named = default_path(topic, torch.device("cpu"))
    return arguments.output or (None if arguments.quick else named.parent / "training" / named.name)


def last_words(arguments: argparse.Namespace, path: Path | None, page: str) -> str:
    """Return what a run says at its end."""
    if arguments.quick:
        return f"This was --quick: it judges nothing{f', and is in {path}' if path else ''}."
    return f"In {path}; python -m tools.pages.{page} makes docs/{page}.md of the newest results."


def main() -> int:
    arguments = parsed_arguments(__doc__)
    output, size = output_of(arguments, "recipes"), QUICK if arguments.quick else FULL
    settings = {**asdict(size), "corpus": corpus().sha256}
    here = facts(load(REPO_ID, VERSION), torch.device("cpu"), settings)
    # Of each row, since a recipe that is added later does not change what the others reach.
    build = {key: here.pop(key) for key in ("commit", "dirty", "files")}
    file = ResultFile(output, {**here, "threads": 1}, [])
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console, spawn = Console(), multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(PROCESSES, spawn, add_folder, (arguments.peers,)) as pool,
    ):
        widths = len(PARAMETRIZATIONS) * len(WIDTHS)
        bar = progress.add_task("training", total=len(CONTENDERS) + widths)

        def ended(job: Job, row: dict | None) -> None:
            if row is not None:
                file.put(job.key, {**build, **row})
            progress.update(bar, advance=1, description=f"{job.key:28}")

        first = Job(BASELINE, 0.0)
        run_jobs([first], size, file, pool, ended)
        # Parameters that are not matrices have, in all recipes, the rate at which AdamW alone is best.
        run_jobs(jobs(file.rows[first.key]["lr"]), size, file, pool, ended)
    console.print(last_words(arguments, output, "recipes"))
    return 0


def jobs(adamw_lr: float) -> list[Job]:
    """Return all jobs but the first: the recipes, then the widths, the largest first."""
    widths = [Job(each.name, adamw_lr, width) for each in PARAMETRIZATIONS for width in WIDTHS]
    recipes = [Job(each.name, adamw_lr) for each in CONTENDERS if each.name != BASELINE]
    return recipes + sorted(widths, key=lambda job: -job.width)


def run_jobs(
    some: Sequence[Job], size: Size, file: ResultFile, pool: Executor, ended: Callable[[Job, dict | None], object]
) -> None:
    """Run those jobs that `file` does not have; `ended` is called with what each measured, None for those it has.

    If some fail, the others end first. Then RuntimeError names those that have failed; another run tries them again.
    """
    started, failed = {}, {}
    for job in some:
        if job.key in file.rows:
            ended(job, None)
        else:
            started[pool.submit(work, job, size, REPO_ID, VERSION)] = job
    for future in as_completed(started):
        try:
            row = future.result()
        except MissingError as missing:
            row = {"status": str(missing)}
        except Exception as error:
            failed[started[future].key] = error
            continue
        ended(started[future], row)
    if failed:
        problems = "; ".join(f"{key}: {type(error).__name__}: {error}" for key, error in failed.items())
        raise RuntimeError(f"not measured: {problems}") from next(iter(failed.values()))


if __name__ == "__main__":
    sys.exit(main())
