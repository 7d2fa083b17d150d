"""The figure of the scale report: a step of Muon compared with the training step that contains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.pages.figure_style import GREY, STYLE
from tools.scale.schemes import Row

OWN_STYLE = {"savefig.dpi": 150, "lines.markersize": 4}
TICKS = {0.01: "10 ms", 0.1: "100 ms", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s"}
PLAIN, DASHED, DOTTED = "-", (0, (5, 2)), (0, (1, 2))


def draw(results: dict, path: Path) -> None:
    """Write a figure with a panel for each model, for the first dtype in the results."""
    rows = [Row(**row) for row in results["rows"]]
    rows = [row for row in rows if (row.dtype, row.team) == (rows[0].dtype, 1)]
    models = list(dict.fromkeys(row.model for row in rows))
    with matplotlib.rc_context({**STYLE, **OWN_STYLE}):
        figure = Figure(figsize=(3.6 * len(models), 4.4))
        panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, model in zip(panels, models):
            _panel(axes, [row for row in rows if row.model == model])
        panels[0].set_ylabel("predicted time")
        # Without the library's version, so that drawing the same figure again gives the same file.
        figure.savefig(path, metadata={"Software": None})


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    gpus = [row.gpus for row in rows]
    muon = [row.seconds["in chunks"] for row in rows]
    training = [row.training_seconds for row in rows]
    everything = [row.seconds["gather everything"] for row in rows]
    largest = [row.seconds_of_largest for row in rows]
    axes.plot(gpus, training, color=GREY, linewidth=2.4, linestyle=PLAIN)
    axes.plot(gpus, everything, color="black", linewidth=1, linestyle=DASHED)
    axes.plot(gpus, largest, color="black", linewidth=1, linestyle=DOTTED)
    axes.plot(gpus, muon, color="black", linewidth=1.6, linestyle=PLAIN, marker="o")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", title=rows[0].model, ylim=(0.006, 120))
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus], fontsize=8)
    axes.set_yticks(list(TICKS), list(TICKS.values()))
    axes.minorticks_off()
    axes.margins(x=0.1)
    for row, seconds in zip(rows, muon):
        share = f"{100 * seconds / row.training_seconds:.2g}%"
        _label(axes, share, (row.gpus, seconds), (2, 5), fontsize=8)
    _label(axes, "training step", (gpus[0], training[0]), (6, 4), color=GREY)
    _label(axes, "Muon,\n% of a training step", (gpus[0], muon[0]), (-4, 20))
    _label(axes, f"products of one largest matrix: {1e3 * largest[0]:.0f} ms", (gpus[0], largest[0]), (-4, -12))
    # At the end that is further from the line of the training step.
    left, right = (abs(math.log(training[end] / everything[end])) for end in (0, -1))
    end, side = (0, "left") if left > right else (-1, "right")
    _label(axes, "Muon, if every rank works on all", (gpus[end], everything[end]), (0, 4), ha=side)


def _label(axes: Axes, text: str, point: tuple[float, float], shift: tuple[float, float], **style) -> None:
    axes.annotate(text, point, shift, textcoords="offset points", **style)
