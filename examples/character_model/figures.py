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
from matplotlib.ticker import FixedLocator, NullLocator

from .comparison import Comparison

# From Okabe and Ito's palette: told apart with every kind of colour vision, and in grey.
COLORS = {"AdamW": "#D55E00", "Muon": "#0072B2"}
BRANCH_COLORS = {"adamw": COLORS["AdamW"], "muon": COLORS["Muon"]}
GREY = "#767676"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "svg.hashsalt": "character_model",  # else the same figure is another file each time
}
MATRIX = "layers.1.mlp.up.weight"


def draw_all(comparison: Comparison, kernel: ModuleType, folder: Path) -> list[str]:
    """Write every figure into `folder`; return their names."""
    G = comparison.muon.state[comparison.model.get_parameter(MATRIX)]["momentum_buffer"].double()
    with matplotlib.rc_context(STYLE):
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
    """Validation loss against steps and against time, mean and range over the seeds."""
    figure = Figure(figsize=(7.0, 2.9))
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for name, color in COLORS.items():
        steps, seconds, losses = comparison.curve(name)
        for axes, x in ((by_step, steps), (by_time, seconds)):
            axes.plot(x, losses.mean(axis=0), color=color)
            axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.25, linewidth=0)
            end = x[-1], losses[:, -1].mean()
            axes.annotate(f"{name} {end[1]:.2f}", end, (4, 0), "data", "offset points", color=color, va="center")
    target, match = comparison.mean_loss("AdamW"), comparison.match()
    lasts = [comparison.curve("AdamW")[axis][-1] for axis in (0, 1)]
    for axes, x, last, unit in zip((by_step, by_time), match or (), lasts, ("steps", "time")):
        axes.hlines(target, x, last, color=GREY, linewidth=0.8, linestyle=(0, (4, 2)))
        axes.plot(x, target, "o", color=COLORS["Muon"], markersize=5, markeredgecolor="white")
        text = f"AdamW's final loss in\n{100 * x / last:.0f} % of its {unit}"
        axes.annotate(text, (x, target), (-6, -6), "data", "offset points", color=GREY, ha="right", va="top")
    # The first evaluations, of a model that knows nothing, would press the rest together.
    top = max(comparison.curve(name)[2][:, 1].max() for name in COLORS)
    bottom = min(comparison.mean_loss(name) for name in COLORS)
    by_step.set_ylim(bottom - 0.15, top + 0.1)
    by_step.set(title="a", xlabel="step", ylabel="validation loss\n(nats per character)")
    by_time.set(title="b", xlabel="training time (s), evaluation excluded")
    by_step.set_xlim(0)
    by_time.set_xlim(0)
    return figure


def tuning_and_time_figure(comparison: Comparison) -> Figure:
    """Loss of the trials by learning rate, and where the time of a step goes."""
    figure = Figure(figsize=(7.0, 2.5))
    tuning, time = figure.subplots(1, 2)
    for name, color in COLORS.items():
        trials = [record for record in comparison.trials if record.run.optimizer == name]
        rates, losses = [r.run.lr for r in trials], [r.validation[-1] for r in trials]
        tuning.plot(rates, losses, "-o", color=color, markersize=4)
        best = losses.index(min(losses))
        tuning.plot(rates[best], losses[best], "o", color="white", markeredgecolor=color, markersize=9, zorder=1)
        tuning.annotate(name, (rates[0], losses[0]), (0, 7), "data", "offset points", color=color, ha="center")
    tuning.set_xscale("log")
    ticks = sorted({rate for rates in comparison.plan.learning_rates.values() for rate in rates})
    plain_ticks(tuning, ticks)
    tuning.set(title="a", xlabel="peak learning rate", ylabel="validation loss\n(nats per character)")
    tuning.margins(y=0.2)
    for row, (name, color) in enumerate(COLORS.items()):
        gradient, stepping = comparison.step_ms(name)
        time.barh(row, gradient, 0.55, color=color, alpha=0.35)
        time.barh(row, stepping, 0.55, left=gradient, color=color)
        time.annotate(f"{stepping:.1f} ms", (gradient + stepping, row), (4, 0), "data", "offset points", va="center")
        time.text(gradient / 2, row, f"forward and backward {gradient:.1f} ms", ha="center", va="center")
    time.set_yticks(range(len(COLORS)), COLORS)
    time.invert_yaxis()
    time.margins(x=0.15)
    time.set(title="b", xlabel="time per step (ms), median; solid: the optimizer")
    return figure


def plain_ticks(axes: Axes, ticks: list[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")


def singular_values_figure(G: torch.Tensor, kernel: ModuleType) -> Figure:
    """What orthogonalization does to the momentum G (m, n), float64, of one matrix."""
    preset = kernel.schedules.PRESETS["polar_express"]
    # In the work dtype of a step, whose rounding belongs to what is shown; measured in float64.
    orthogonalized = kernel.orthogonalize(G.float()).double()
    U, before, Vh = torch.linalg.svd(G / torch.linalg.matrix_norm(G), full_matrices=False)
    after = torch.linalg.svdvals(orthogonalized)
    moved = torch.einsum("ik,ij,kj->k", U, orthogonalized, Vh)
    figure = Figure(figsize=(7.0, 2.9))
    spectrum, mapping = figure.subplots(1, 2)
    index = np.arange(1, len(before) + 1)
    for values, color, text in ((before, GREY, "momentum G / |G|"), (after, COLORS["Muon"], "orthogonalized")):
        spectrum.plot(index, values, color=color)
        middle = index[len(index) // 2], values[len(index) // 2]
        spectrum.annotate(text, middle, (0, 8), "data", "offset points", color=color, ha="center")
    spectrum.set(yscale="log", title="a", xlabel="index", ylabel="singular value")
    spectrum.set_ylim(top=3)
    x = np.geomspace(before.min() / 2, 1, 500)
    mapping.plot(x, compose(x, preset.coefficients[:5]), color=COLORS["Muon"])
    mapping.plot(before, moved, "o", color="black", markersize=2.5, markeredgewidth=0)
    mapping.set(xscale="log", title="b", xlabel="singular value of G / |G|", ylabel="of the orthogonalized matrix")
    mapping.set_ylim(0)
    for axes in (spectrum, mapping):
        axes.axhspan(*preset.band, color=COLORS["Muon"], alpha=0.15, linewidth=0)
    return figure


def compose(x: np.ndarray, schedule: Sequence[tuple[float, float, float]]) -> np.ndarray:
    for a, b, c in schedule:
        x = a * x + b * x**3 + c * x**5
    return x


def routing_figure(rows: Sequence[Any]) -> Figure:
    """The routing table of `explain()` as a picture: which parameter is whose, how large, and why."""
    figure = Figure(figsize=(7.0, 0.19 * len(rows) + 0.6))
    axes = figure.subplots()
    sizes = [math.prod(row.shape) for row in rows]
    axes.barh(range(len(rows)), sizes, 0.7, color=[BRANCH_COLORS[row.branch] for row in rows])
    for position, (row, size) in enumerate(zip(rows, sizes)):
        shape = " × ".join(map(str, row.shape))
        scale = f", lr × {row.multiplier:.2f}" if row.multiplier else ""
        axes.annotate(f"{shape}   {row.reason}{scale}", (size, position), (4, 0), "data", "offset points", va="center")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="elements")
    axes.margins(y=0.01)
    return figure
