"""Train every model with every rate, one run after the other, and write what each reaches into one file.

python -m examples.learning_rates.experiment [--output FILE] [--quick]

The environment names the Hub. A second run of the same day, or with the same --output, goes on where the first one
ended. What --quick finds is written only where --output says.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from benchmarks.result_file import ResultFile, facts

from ..character_model.experiment import REPO_ID, VERSION
from ..recipes.experiment import last_words, output_of
from ..recipes.trials import corpus, load
from .plan import FULL, MODELS, QUICK, Measure, Size, Training, candidates, finals, longest
from .problems import loss_after


def parsed_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file; by default in benchmarks/results/training")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; proves nothing")
    return parser.parse_args()


def main() -> int:
    arguments = parsed_arguments(__doc__)
    output, size = output_of(arguments, "learning-rates"), QUICK if arguments.quick else FULL
    torch.set_num_threads(1)
    kernel = load(REPO_ID, VERSION)
    settings = {
        **asdict(size),
        "grids": {name: asdict(grid) for name, grid in MODELS.items()},
        "corpus": corpus().sha256,
    }
    file, console = ResultFile(output, facts(kernel, torch.device("cpu"), settings), []), Console()

    def measure(training: Training) -> float:
        if training.key not in file.rows:
            started = perf_counter()
            file.put(training.key, {"loss": loss_after(training, kernel, size.windows)})
            seconds = perf_counter() - started
            console.print(
                f"{training.key}: {file.rows[training.key]['loss']:.3f} ({seconds:.0f} s)",
                highlight=False,
                soft_wrap=True,
            )
        return file.rows[training.key]["loss"]

    run_all(size, measure)
    console.print(last_words(arguments, output, "learning_rates"))
    return 0


def run_all(size: Size, measure: Measure) -> None:
    """Measure what the page shows."""
    for training in longest(size, measure):
        measure(training)
    for model in MODELS:
        for setting in candidates(model, size, measure).values():
            for training in finals(model, setting, size):
                measure(training)


if __name__ == "__main__":
    sys.exit(main())
