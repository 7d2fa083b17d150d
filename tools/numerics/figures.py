"""The figures of docs/numerics.md, each a PNG of a page's width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.support.spectra import composed
from tools.numerics.document import named, unique
from tools.pages.figure_style import GREY, STYLE

# From Okabe and Ito's palette: distinguishable with every kind of colour vision, and in grey by their markers.
COLORS = {"float32": "#009E73", "float16": "#0072B2", "bfloat16": "#D55E00"}
MARKERS_BY_DTYPE = {"float32": "s", "float16": "o", "bfloat16": "D"}
MARKERS = {"standard": "o", "gram": "D", "gram_float32": "s"}
HEIGHTS = {"standard": -0.18, "gram": 0.0, "gram_float32": 0.18}
OWN_STYLE = {"lines.linewidth": 1.4, "legend.frameon": False, "savefig.dpi": 150}
# A result with a larger error has nothing to do with the exact one.
WORST = 1e3
LOWEST = 1e-6


def draw_all(results: dict, folder: Path) -> list[str]:
    """Write every figure into `folder`; return their names."""
    with matplotlib.rc_context({**STYLE, **OWN_STYLE}):
        drawn = {
            "numerics-errors": errors_figure(results["errors"]),
            "numerics-schedules": schedules_figure(results["schedules"]),
            "numerics-restarts": restarts_figure(results["restarts"], results["limit"]),
            "numerics-scale": scale_figure(results["scales"]),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            # Without the version of the library, so that the same figure is the same file.
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
    return [f"{name}.png" for name in drawn]


def errors_figure(rows: Sequence[dict]) -> Figure:
    """The error for each spectrum, by dtype and method."""
    rows = [row for row in rows if row["schedule"] == "polar_express"]
    spectra = unique(row["spectrum"] for row in rows)
    figure = Figure(figsize=(7.0, 3.6))
    axes = figure.subplots()
    for dtype, method in unique((row["dtype"], row["method"]) for row in rows):
        points = [row for row in rows if (row["dtype"], row["method"]) == (dtype, method)]
        heights = [spectra.index(row["spectrum"]) + HEIGHTS[method] for row in points]
        style = dict(color=COLORS[dtype], markersize=5, label=f"{dtype} {method}")
        hollow = {} if method == "standard" else {"markerfacecolor": "white"}
        axes.plot([row["error"] for row in points], heights, MARKERS[method], **style, **hollow)
    for place in range(len(spectra)):
        axes.axhline(place, color=GREY, linewidth=0.3, zorder=0)
    axes.set_yticks(range(len(spectra)), [name.replace("_", " ") for name in spectra])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=r"error, $\Vert X - p(G)\Vert_F\, /\, \Vert p(G)\Vert_F$", ylabel="singular values")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def schedules_figure(schedules: dict[str, dict]) -> Figure:
    """Where five steps of each preset take a singular value, and the band that is promised for values from 1e-3 on."""
    figure = Figure(figsize=(7.0, 4.2))
    x = np.geomspace(1e-4, 1, 20_000)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (name, schedule) in zip(panels.flat, schedules.items()):
        low, high = schedule["band"]
        axes.axhspan(low, high, color=COLORS["float16"], alpha=0.15, linewidth=0)
        axes.axhline(1, color=GREY, linewidth=0.6, linestyle=(0, (4, 2)))
        axes.axvline(1e-3, color=GREY, linewidth=0.6, linestyle=(0, (1, 2)))
        axes.plot(x, composed(schedule["coefficients"], x), color=COLORS["float16"], linewidth=0.9)
        axes.set(title=name.replace("_", " "), xscale="log", ylim=(0, 1.4))
        axes.text(1, 0.08, f"shaded: {low:.2f} to {high:.2f}", color=GREY, ha="right")
    for axes in panels[-1]:
        axes.set_xlabel(r"$\sigma$, singular value of $G/\Vert G\Vert_F$")
    for axes in panels[:, 0]:
        axes.set_ylabel(r"$p(\sigma)$")
    return figure


def restarts_figure(rows: Sequence[dict], limit: float) -> Figure:
    """The bound for each restart of Polar Express, and the error on the worst matrix."""
    rows = [row for row in rows if row["schedule"] == "polar_express"]
    windows = unique(named(row["restarts"]) for row in rows if row["restarts"] is not None)
    figure = Figure(figsize=(7.0, 3.6))
    predicted, observed = figure.subplots(1, 2, sharey=True)
    predicted.axhspan(LOWEST, limit, color=GREY, alpha=0.15, linewidth=0)
    predicted.text(0, 2 * LOWEST, "shaded: taken for safe", color=GREY)
    for shift, (dtype, color) in zip((-0.2, 0, 0.2), COLORS.items()):
        restart_rows = {named(row["restarts"]): row for row in rows if row["dtype"] == dtype}
        places = [place + shift for place in range(len(windows))]
        draw_points(predicted, places, [restart_rows[name]["bound"] for name in windows], color, dtype)
        draw_points(observed, places, [restart_rows[name]["error"] for name in windows], color, dtype)
        observed.axhline(restart_rows["standard"]["error"], color=color, linewidth=0.8, linestyle=(0, (4, 2)))
    observed.text(0, 2 * LOWEST, "dashed: the standard iteration", color=GREY)
    predicted.set(title="a  bound: amplification × roundoff", ylabel="change of the result")
    observed.set(title="b  worst relative error")
    for axes in (predicted, observed):
        axes.set(yscale="log", ylim=(LOWEST, 2 * WORST), xlabel="windows of the Gram iteration")
        axes.set_xticks(range(len(windows)), [name.removeprefix("gram") for name in windows], rotation=45)
    observed.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_points(axes: Axes, places: Sequence[float], values: Sequence[float | None], color: str, name: str) -> None:
    """Draw values up to WORST; larger and non-finite ones are arrows there."""
    beyond = [value is None or value > WORST for value in values]
    inside = [(place, value) for place, value, above in zip(places, values, beyond) if not above]
    axes.plot(*zip(*inside), MARKERS_BY_DTYPE[name], color=color, label=name, markersize=4.5)
    axes.plot([place for place, above in zip(places, beyond) if above], [WORST] * sum(beyond), "^", color=color)


def scale_figure(rows: Sequence[dict]) -> Figure:
    """What float16's scale saves in the Gram matrix. Results of these sizes do not show it yet."""
    figure = Figure(figsize=(7.0, 2.8))
    product, result = figure.subplots(1, 2, sharey=True)
    for label, line in (("without", (0, (4, 2))), ("with", "-")):
        draw_by_side(product, rows, f"product_{label}", f"{label} scale", color=COLORS["float16"], linestyle=line)
        for method, color in (("standard", GREY), ("gram", COLORS["bfloat16"])):
            name = method if label == "with" else ""
            draw_by_side(result, rows, f"{method}_{label}", name, color=color, linestyle=line)
    product.set(title="a  X Xᵀ, rounded", ylabel="relative error")
    result.set(title="b  result, dashed without scale")
    sides = [row["m"] for row in rows]
    for axes in (product, result):
        axes.set(
            xscale="log", yscale="log", xlabel="m of a Gaussian m × m matrix", xlim=(sides[0] / 1.2, sides[-1] * 3)
        )
        axes.set_xticks(sides, [str(side) for side in sides])
        axes.xaxis.minorticks_off()
    return figure


def draw_by_side(axes: Axes, rows: Sequence[dict], key: str, name: str, **style: Any) -> None:
    """Draw a line over m where there are values, with its name above its end."""
    points = [(row["m"], row[key]) for row in rows if row[key] is not None]
    axes.plot(*zip(*points), marker="o", markersize=4, **style)
    axes.annotate(name, points[-1], (6, 6), "data", "offset points", color=style["color"])
