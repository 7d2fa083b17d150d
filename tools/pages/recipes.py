"""Put what every recipe reached (`python -m examples.recipes`) into docs/recipes.md: its tables, and its figures.

python -m tools.pages.recipes [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.recipes.contenders import CONTENDERS, MUON, PARAMETRIZATIONS, WIDTHS
from tools.pages import markdown
from tools.pages.figure_style import GREY, STYLE
from tools.pages.generated import newest, write_or_check

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "training"
PAGE = ROOT / "docs" / "recipes.md"
FIGURES = ROOT / "docs" / "figures"
HEADINGS = ("recipe", "what is written", "best lr", "loss", "less than Muon", "source")
# From Okabe and Ito's palette, dark for wide.
COLORS = ("#56B4E9", "#0072B2", "#D55E00", "#000000")
# Nats: the right half of the figure has recipes that differ less from Muon.
NEAR = 0.05

Rows = dict[str, dict]


def main() -> int:
    content = results()
    rows = {row["case"]: row for row in content["results"]}
    status = write_or_check({PAGE: page(PAGE.read_text(), content)}, __doc__)
    if "--check" not in sys.argv:
        with matplotlib.rc_context(STYLE):
            recipes_figure(rows).savefig(FIGURES / "recipes.png", dpi=200)
            widths_figure(rows).savefig(FIGURES / "recipes-widths.png", dpi=200)
    return status


def results() -> dict:
    """Return the content of the newest file."""
    return json.loads(newest(RESULTS, "recipes", "examples.recipes").read_text())


def page(before: str, content: dict) -> str:
    """Return the page with its tables made of a file's content."""
    rows = {row["case"]: row for row in content["results"]}
    commits = sorted({row["commit"][:7] for row in rows.values()})
    origin = f"{content['device']}, Python {content['python']}, torch {content['torch']}; commits {', '.join(commits)}."
    tables = {"recipes": f"{recipes_table(rows)}\n\n{origin}", "widths": widths_table(rows)}
    return markdown.fill(before, tables)


def recipes_table(rows: Rows) -> str:
    """Return the table of recipes in the order of `CONTENDERS`."""
    shown = []
    for contender in CONTENDERS:
        row, written = rows[contender.name], f"`{contender.changes}`" if contender.changes else "defaults"
        if row["status"] != "measured":
            shown.append((contender.name, written, "", row["status"], "", contender.source))
            continue
        less = "" if contender.name == MUON else spread(gains(rows, contender.name))
        shown.append((contender.name, written, f"{row['lr']:g}", spread(finals(row)), less, contender.source))
    return markdown.table(HEADINGS, shown)


def widths_table(rows: Rows) -> str:
    """Return the best learning rate of each width, and its loss."""
    shown = []
    for each in PARAMETRIZATIONS:
        best = [min(rows[f"{each.name}, width {width}"]["trials"], key=lambda trial: trial[1]) for width in WIDTHS]
        shown.append((each.name, *(f"{lr:g} ({loss:.3f})" for lr, loss in best)))
    return markdown.table(("parametrization", *(f"width {w}" for w in WIDTHS)), shown)


def finals(row: dict) -> list[float]:
    """Return the last validation loss of each seed, in nats per character."""
    return [losses[-1] for losses in row["validation"]]


def gains(rows: Rows, name: str) -> list[float]:
    """Return by how much a recipe ends below Muon, for each seed: both saw the same batches."""
    return [muon - loss for muon, loss in zip(finals(rows[MUON]), finals(rows[name]))]


def spread(values: list[float]) -> str:
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def recipes_figure(rows: Rows) -> Figure:
    """By how much each recipe ends below Muon: every seed, and their mean; on the right those near Muon alone."""
    names = [each.name for each in CONTENDERS if each.name != MUON and rows[each.name]["status"] == "measured"]
    names.sort(key=lambda name: fmean(gains(rows, name)))
    figure = Figure(figsize=(7.0, 0.24 * len(names) + 0.8))
    panels = figure.subplots(1, 2, sharey=True)
    for height, name in enumerate(names):
        values = gains(rows, name)
        for axes in panels if abs(fmean(values)) < NEAR else panels[:1]:
            axes.plot(values, [height] * len(values), "o", color=COLORS[0], markersize=4)
            axes.plot(fmean(values), height, "|", color=COLORS[3], markersize=12, markeredgewidth=1.6)
    for axes in panels:
        axes.axvline(0.0, color=GREY, linewidth=0.8)
        axes.margins(x=0.08)
    panels[0].set_yticks(range(len(names)), names)
    figure.supxlabel("nats per character below Muon (right is better); dots are seeds, lines their means", fontsize=9)
    return figure


def widths_figure(rows: Rows) -> Figure:
    """Loss against learning rate for each width: where rates transfer, the lowest points lie above each other."""
    figure = Figure(figsize=(7.0, 2.8))
    panels = figure.subplots(1, len(PARAMETRIZATIONS), sharey=True)
    for axes, each in zip(panels, PARAMETRIZATIONS):
        for width, color in zip(WIDTHS, COLORS):
            draw_width(axes, rows[f"{each.name}, width {width}"]["trials"], f"width {width}", color)
        axes.set(xscale="log", title=each.name, xlabel="learning rate")
        axes.set_xticks(each.rates, [f"{rate:g}" for rate in each.rates])
        axes.minorticks_off()
    panels[0].set(ylabel="validation loss\n(nats/character)")
    panels[-1].legend(frameon=False, fontsize=8)
    return figure


def draw_width(axes: Axes, trials: list[tuple[float, float]], name: str, color: str) -> None:
    """Draw one line, with a ring around its lowest point."""
    rates, losses = np.array(trials).T
    best = losses.argmin()
    axes.plot(rates, losses, "-o", color=color, markersize=3, linewidth=1.4, label=name)
    axes.plot(rates[best], losses[best], "o", color="none", markeredgecolor=color, markersize=9)


if __name__ == "__main__":
    sys.exit(main())
