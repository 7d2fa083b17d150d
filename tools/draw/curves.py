"""Curves of logs: the loss against steps and time, with bands over seeds; the size of updates, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from .log import Log, by_name
from .theme import SERIES, Drawing

LAYER = "update_rms/"
WHOLE = "muon_update_rms"
# What tells layers apart whose colours are the same.
DASHES = "-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1))


def band(logs: Sequence[Log], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return `key` of runs with several seeds, (runs, steps), and the same of the steps that all of them logged."""
    steps = sorted(set.intersection(*(set(log.column("step")) for log in logs)))
    if not steps:
        raise ValueError(f"the logs of {logs[0].name} have no step in common")
    rows = [dict(zip(log.column("step"), log.column(key))) for log in logs]
    return np.array([[row[step] for step in steps] for row in rows]), np.array(steps)


def loss(logs: Sequence[Log]) -> Drawing:
    """Return the drawing of the mean loss, and its range over seeds, against steps and against mean seconds."""
    groups = {name: [*band(runs, "loss"), band(runs, "seconds")[0]] for name, runs in by_name(logs).items()}
    missing = [name for name, (losses, _, _) in groups.items() if np.isnan(losses).any()]
    if missing:
        raise ValueError(f"the log of {', '.join(missing)} has lines without a loss")
    timed = not any(np.isnan(seconds).any() for _, _, seconds in groups.values())

    def draw(theme: str) -> Figure:
        figure = Figure(figsize=(7.6 if timed else 4.4, 3.0))
        panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
        for (name, (losses, steps, seconds)), colour in zip(groups.items(), _colours(theme)):
            mean, label = losses.mean(axis=0), f"{name} ({len(losses)} runs)" if len(losses) > 1 else name
            for axes, x in zip(panels, (steps, seconds.mean(axis=0))):
                axes.plot(x, mean, color=colour, linewidth=1.4, label=f"{label}, at the end {mean[-1]:.3f}")
                axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.25, linewidth=0)
        panels[0].set(xlabel="step", ylabel="loss")
        panels[-1].set_xlabel("seconds" if timed else "step")
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper left", ncols=min(len(groups), 3), frameon=False)
        return figure

    return draw


def update_rms(logs: Sequence[Log]) -> Drawing:
    """Return the drawing of the root mean square of each layer's updates over the steps of one log.

    Those are the metrics `update_rms/<name>`, or where there are none `muon_update_rms`, of all matrices together.
    """
    if len(logs) != 1:
        raise ValueError(f"updates are drawn of one log, got {len(logs)}")
    (log,) = logs
    layers = [key for key in log.metrics() if key.startswith(LAYER)] or [k for k in log.metrics() if k == WHOLE]
    if not layers:
        raise ValueError(f"the log of {log.name} has no metric {LAYER}<name> and no {WHOLE}")

    def draw(theme: str) -> Figure:
        figure = Figure(figsize=(7.6, 3.0 + 0.1 * max(0, len(layers) - 12)))
        axes = figure.subplots()
        for number, (key, colour) in enumerate(zip(layers, _colours(theme))):
            dashes = DASHES[number // len(SERIES[theme]) % len(DASHES)]
            style = {"color": colour, "linestyle": dashes, "linewidth": 1.1, "label": key.removeprefix(LAYER)}
            axes.plot(log.column("step"), log.column(key), **style)
        axes.set(xlabel="step", ylabel="root mean square of an update", yscale="log")
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + len(layers) // 20)
        return figure

    return draw


def _colours(theme: str):
    """Yield colours without end."""
    while True:
        yield from SERIES[theme]
