"""The figures of the comparison, each as PNG and as SVG; widths are those of a printed page's text, in inches."""
from __future__ import annotations

from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

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
    O = kernel.orthogonalize(G.float()).double()
    U, sigma, Vh = torch.linalg.svd(G / torch.linalg.matrix_norm(G), full_matrices=False)
    figure = Figure(figsize=(7.0, 2.9))
    spectrum, mapping = figure.subplots(1, 2, sharey=True)
    index = np.arange(1, len(sigma) + 1)
    spectrum.plot(index, sigma, color=GREY)
    spectrum.plot(index, torch.linalg.svdvals(O), color=COLORS["Muon"])
    mapping.plot(x := np.geomspace(sigma.min(), 1, 500), compose(x, preset.coefficients[:5]), color=COLORS["Muon"])
    mapping.plot(x, x, color=GREY, linewidth=0.8, linestyle=(0, (4, 2)))
    moved = torch.einsum("im,ij,mj->m", U, O, Vh)
    mapping.plot(sigma, moved, "o", color="black", markersize=2.5, alpha=0.6, markeredgewidth=0)
    for axes in (spectrum, mapping):
        axes.axhspan(*preset.band, color=COLORS["Muon"], alpha=0.15, linewidth=0)
    return figure


def compose(x: np.ndarray, schedule) -> np.ndarray:
    for a, b, c in schedule:
        x = a * x + b * x**3 + c * x**5
    return x
