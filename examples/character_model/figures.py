"""The figures of the comparison, each as PNG and as SVG; widths are those of a printed page's text, in inches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.support.spectra import composed
from tools.pages.figure_style import GREY, STYLE

from .comparison import Comparison

# From Okabe and Ito's palette: told apart with every kind of colour vision, and in grey.
COLORS = {"AdamW": "#D55E00", "Muon": "#0072B2"}
BRANCHES = {"muon": "Muon", "adamw": "AdamW"}
OWN_STYLE = {
    "lines.linewidth": 1.6,
    "savefig.dpi": 200,
    "svg.hashsalt": "character_model",  # else the same figure is another file each time
}
MATRIX = "layers.1.mlp.up.weight"


def draw_all(comparison: Comparison, kernel: ModuleType, folder: Path) -> list[str]:
    """Write every figure into `folder`; return their names."""
    G = comparison.muon.state[comparison.model.get_parameter(MATRIX)]["momentum_buffer"].double()
    with matplotlib.rc_context({**STYLE, **OWN_STYLE}):
        drawn = {
            "loss": loss_figure(comparison),
            "tuning_and_time": tuning_and_time_figure(comparison),
            "singular_values": singular_values_figure(G, kernel),
            "routing": routing_figure(comparison.muon.explain().rows),
        }
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.png")
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return list(drawn)


def loss_figure(comparison: Comparison) -> Figure:
    """Validation loss against steps and against time: mean and range over the seeds."""
    figure = Figure(figsize=(7.0, 2.8))
    panels = figure.subplots(1, 2, sharey=True)
    for name, color in COLORS.items():
        steps, seconds, losses = comparison.curve(name)
        for axes, x in zip(panels, (steps, seconds)):
            axes.plot(x, losses.mean(axis=0), color=color)
            axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.25, linewidth=0)
            end = x[-1], losses[:, -1].mean()
            label(axes, f"{name}, {end[1]:.2f}", end, color, offset=(5, 0))
    draw_match(panels, comparison)
    # The first evaluation, of a model that knows nothing, would press the others together.
    top = max(comparison.curve(name)[2][:, 1].max() for name in COLORS)
    panels[0].set_ylim(min(map(comparison.mean_loss, COLORS)) - 0.25, top + 0.1)
    panels[0].set(title="a", xlabel="step", ylabel="validation loss (nats/character)")
    panels[1].set(title="b", xlabel="training time (s), without evaluation")
    for axes in panels:
        axes.set_xlim(0)
    return figure


def draw_match(panels: Sequence[Axes], comparison: Comparison) -> None:
    """Mark where Muon has AdamW's final loss, in steps and in seconds."""
    target, steps_and_seconds = comparison.mean_loss("AdamW"), comparison.curve("AdamW")
    for axes, x, axis, unit in zip(panels, comparison.match() or (), steps_and_seconds, ("steps", "time")):
        axes.hlines(target, x, axis[-1], color=GREY, linewidth=0.8, linestyle=(0, (4, 2)))
        axes.plot(x, target, "o", color=COLORS["Muon"], markersize=6, markeredgecolor="white")
        text = f"Muon has AdamW's final loss\nafter {100 * x / axis[-1]:.0f} % of AdamW's {unit}"
        axes.text(0.03, 0.05, text, transform=axes.transAxes, color=GREY)


def tuning_and_time_figure(comparison: Comparison) -> Figure:
    """The loss of the trials by learning rate, and where the time of a step goes."""
    figure = Figure(figsize=(7.0, 2.4))
    tuning, time = figure.subplots(1, 2)
    for row, (name, color) in enumerate(COLORS.items()):
        trials = [record for record in comparison.trials if record.run.optimizer == name]
        points = [(record.run.lr, record.validation[-1]) for record in trials]
        tuning.plot(*zip(*points), "-o", color=color, markersize=4)
        tuning.plot(*min(points, key=lambda point: point[1]), "o", color="none", markeredgecolor=color, markersize=10)
        label(tuning, name, points[0], color, offset=(0, 10))
        gradient, stepping = comparison.step_ms(name)
        time.barh(row, gradient, 0.5, color=color, alpha=0.35)
        time.barh(row, stepping, 0.5, left=gradient, color=color)
        time.text(gradient / 2, row, f"gradient {gradient:.1f}", ha="center", va="center")
        label(time, f"{name}\n{stepping:.1f}", (gradient + stepping, row), color, offset=(4, 0))
    tuning.set_xscale("log")
    rates = sorted({rate for rates in comparison.plan.learning_rates.values() for rate in rates})
    tuning.set_xticks(rates, [f"{rate:g}" for rate in rates])
    tuning.minorticks_off()
    tuning.margins(0.12, 0.2)
    tuning.set(title="a", xlabel="peak learning rate", ylabel="validation loss\n(nats/character)")
    time.set_yticks([])
    time.invert_yaxis()
    time.set(title="b", xlabel="median time per step (ms)")
    return figure


def singular_values_figure(G: torch.Tensor, kernel: ModuleType) -> Figure:
    """What orthogonalization does to the momentum G (m, n), float64, of one matrix."""
    preset = kernel.schedules.PRESETS["polar_express"]
    # In the work dtype of a step, whose rounding belongs to what is shown; measured in float64.
    orthogonalized = kernel.orthogonalize(G.float()).double()
    U, before, Vh = torch.linalg.svd(G / torch.linalg.matrix_norm(G), full_matrices=False)
    after = torch.linalg.svdvals(orthogonalized)
    figure = Figure(figsize=(7.0, 2.8))
    spectrum, mapping = figure.subplots(1, 2)
    index, quarter = np.arange(1, len(before) + 1), len(before) // 4
    for values, color, text in ((before, GREY, r"before: $G/\Vert G\Vert_F$"), (after, COLORS["Muon"], "after")):
        spectrum.plot(index, values, color=color)
        label(spectrum, text, (index[quarter], values[quarter]), color, offset=(6, 9))
    spectrum.set(yscale="log", title="a", xlabel="index, largest first", ylabel="singular value", ylim=(None, 3))
    # Near 1 the polynomial, of degree 5 to the 5th, turns hundreds of times.
    x = np.geomspace(1e-5, 1, 20_000)
    mapping.plot(x, composed(preset.coefficients[:5], x), color=COLORS["Muon"], linewidth=0.6)
    mapping.plot(before, torch.einsum("ik,ij,kj->k", U, orthogonalized, Vh), "k.", markersize=3.5)
    mapping.set(xscale="log", title="b", xlabel=r"singular value of $G/\Vert G\Vert_F$", ylabel="singular value after")
    low, high = preset.band
    text = f"line: the polynomial\ndots: this matrix\nshaded: {low:.2f} to {high:.2f}"
    label(mapping, text, (4e-3, 0.4), GREY, offset=(0, 0))
    for axes in (spectrum, mapping):
        axes.axhspan(low, high, color=COLORS["Muon"], alpha=0.15, linewidth=0)
    return figure


def routing_figure(rows: Sequence[Any]) -> Figure:
    """The rows of `explain()` as a picture: which parameter is whose, how large it is, and why."""
    figure = Figure(figsize=(7.0, 0.18 * len(rows) + 0.6))
    axes = figure.subplots()
    sizes = [math.prod(row.shape) for row in rows]
    for position, (row, size) in enumerate(zip(rows, sizes)):
        axes.barh(position, size / 1e3, 0.7, color=COLORS[BRANCHES[row.branch]])
        shape = " × ".join(map(str, row.shape))
        scale = f", lr × {row.multiplier:.2f}" if row.multiplier else ""
        label(axes, f"{shape}, {row.reason}{scale}", (size / 1e3, position), "black", offset=(4, 0))
    for height, (branch, name) in zip((0.24, 0.16), BRANCHES.items()):
        total = sum(size for row, size in zip(rows, sizes) if row.branch == branch)
        axes.text(0.98, height, f"{name}: {total:,} elements", transform=axes.transAxes, color=COLORS[name], ha="right")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set(xlabel="elements (thousands)")
    return figure


def label(axes: Axes, text: str, point: tuple[float, float], color: str, offset: tuple[float, float]) -> None:
    """Write `text` beside a point of the data; `offset` in printer's points, to the text's left edge and middle."""
    axes.annotate(text, point, offset, "data", "offset points", color=color, va="center")
