"""Put what every learning rate reached (`python -m examples.learning_rates`) into docs/learning_rates.md.

python -m tools.pages.learning_rates [--check]
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.learning_rates.plan import (
    LONGEST,
    MODELS,
    Measure,
    Setting,
    Size,
    Trials,
    candidates,
    finals,
    longest,
)
from tools.pages import markdown
from tools.pages.figure_style import STYLE
from tools.pages.generated import newest, write_or_check

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "training"
PAGE = ROOT / "docs" / "learning_rates.md"
FIGURE = ROOT / "docs" / "figures" / "learning-rates.png"
# Of the largest losses nothing is to be seen but that they are large: this percentile has the darkest color.
DARKEST = 80
RING = "#D55E00"


def main() -> int:
    content = results()
    status = write_or_check({PAGE: page(PAGE.read_text(), content)}, __doc__)
    if "--check" not in sys.argv:
        with matplotlib.rc_context(STYLE):
            figure(size_of(content), measured(content)).savefig(FIGURE, dpi=200)
    return status


def results() -> dict:
    """Return the content of the newest file."""
    return json.loads(newest(RESULTS, "learning-rates", "examples.learning_rates").read_text())


def size_of(content: dict) -> Size:
    return Size(**{field.name: content[field.name] for field in fields(Size)})


def measured(content: dict) -> Measure:
    """Return the loss of every training that a file has; KeyError for another."""
    losses = {row["case"]: row["loss"] for row in content["results"]}
    return lambda training: losses[training.key]


def page(before: str, content: dict) -> str:
    """Return the page with its tables made of a file's content."""
    size, measure = size_of(content), measured(content)
    origin = (
        f"{content['device']}, Python {content['python']}, torch {content['torch']}; commit {content['commit'][:7]}."
    )
    tables = {"recipes": f"{recipes_table(size, measure)}\n\n{origin}", "longest": longest_table(size, measure)}
    return markdown.fill(before, tables)


def recipes_table(size: Size, measure: Measure) -> str:
    """Return what every candidate reached with each model, the mean and the range over its seeds."""
    chosen = {model: candidates(model, size, measure) for model in MODELS}
    names = list(dict.fromkeys(name for of_model in chosen.values() for name in of_model))
    rows = [(name, *(reached(model, chosen[model].get(name), size, measure) for model in MODELS)) for name in names]
    return markdown.table(("recipe", *MODELS), rows)


def reached(model: str, setting: Setting | None, size: Size, measure: Measure) -> str:
    """Return a cell: the rates, and the loss over the seeds; empty for a model that has no such candidate."""
    if setting is None:
        return ""
    losses = [measure(training) for training in finals(model, setting, size)]
    return f"{rates(setting)}: **{fmean(losses):.3f}** ({min(losses):.3f} to {max(losses):.3f})"


def rates(setting: Setting) -> str:
    """Return the rate of matrices and AdamW's, or the one that both have."""
    return f"{setting.lr:g}" if setting.lr == setting.adamw_lr else f"{setting.lr:g}, {setting.adamw_lr:g}"


def longest_table(size: Size, measure: Measure) -> str:
    """Return the losses of the longest runs beside those of the trials with the same rates."""
    rows, losses = [], []
    for training in longest(size, measure):
        setting = training.setting
        losses.append(measure(training))
        rows.append((setting.optimizer, rates(setting), f"{Trials(LONGEST, size, measure).loss(setting):.3f}"))
    shown = [(*row, f"**{loss:.3f}**" if loss == min(losses) else f"{loss:.3f}") for row, loss in zip(rows, losses)]
    headings = ("optimizer", "lr, adamw_lr", f"{size.trial_steps} steps", f"{size.longest_steps} steps")
    return markdown.table(headings, shown)


def figure(size: Size, measure: Measure) -> Figure:
    """The loss of every trial over both rates, a panel for each model; rings are the best ones."""
    grids = [Trials(model, size, measure) for model in MODELS]
    drawn = Figure(figsize=(9.6, 3.2))
    panels = drawn.subplots(1, len(grids), width_ratios=[len(grid.adamw_rates) for grid in grids])
    for axes, grid in zip(panels, grids):
        draw_grid(axes, grid)
    panels[0].set(ylabel="lr, of matrices")
    return drawn


def draw_grid(axes: Axes, trials: Trials) -> None:
    rows, columns = trials.rates, trials.adamw_rates
    losses = np.array([trials.loss(each) for each in trials.grid()]).reshape(len(rows), len(columns))
    best, darkest = losses.min(), np.percentile(losses, DARKEST)
    axes.imshow(losses, cmap="Blues", vmin=best, vmax=darkest, origin="lower", aspect="auto")
    for (row, column), loss in np.ndenumerate(losses):
        color = "white" if loss > 0.4 * best + 0.6 * darkest else "black"
        weight = "bold" if loss == best else "normal"
        axes.text(column, row, f"{loss:.3f}", ha="center", va="center", color=color, fontsize=7.5, weight=weight)
    row, column = np.unravel_index(losses.argmin(), losses.shape)
    axes.plot(column, row, "o", color="none", markeredgecolor=RING, markersize=27, markeredgewidth=1.4)
    axes.set_xticks(range(len(columns)), [f"{rate:g}" for rate in columns])
    axes.set_yticks(range(len(rows)), [f"{rate:g}" for rate in rows])
    axes.set(title=trials.model.replace(", ", ",\n"), xlabel="adamw_lr")
    axes.tick_params(length=0)


if __name__ == "__main__":
    sys.exit(main())
