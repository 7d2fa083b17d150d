"""Spectra of momentum, before orthogonalization and after it, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from matplotlib.figure import Figure
from torch import Tensor

from .checkpoint import MOMENTUM, Entry
from .theme import BRANCHES, Drawing, grey

COLUMNS = 4
MOST = 24


def spectra(entries: Sequence[Entry], kernel: ModuleType) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, by layer, the singular values of its momentum divided by their norm, and of its polar factor by `kernel`.

    Stacks and convolutions are matrices of their first dimension. ValueError where no momentum is floating point.
    """
    pairs = {}
    for entry in entries:
        momentum = entry.state.get(MOMENTUM)
        if momentum is None or not momentum.is_floating_point() or not momentum.any():
            continue
        G = momentum.float().flatten(1)
        before = torch.linalg.svdvals(G.double())
        after = torch.linalg.svdvals(kernel.orthogonalize(G, dtype=torch.float32).double())
        pairs[entry.name] = before / before.norm(), after
    if not pairs:
        raise ValueError("no parameter has momentum in floating point that is not zero: the run has not begun?")
    return pairs


def draw_spectra(values: dict[str, tuple[Tensor, Tensor]]) -> Drawing:
    """Return the drawing: a panel for each layer, evenly chosen where there are more than fit."""
    names = list(values)
    if len(names) > MOST:
        names = [names[round(i * (len(names) - 1) / (MOST - 1))] for i in range(MOST)]

    def draw(theme: str) -> Figure:
        rows = -(-len(names) // COLUMNS)
        figure = Figure(figsize=(2.4 * COLUMNS, 1.9 * rows + 0.4))
        panels = list(figure.subplots(rows, COLUMNS, squeeze=False, sharey=True).flat)
        lowest = max(min(float(before[before > 0].min()) for before, _ in values.values()), 1e-7)
        for axes in panels[len(names) :]:
            axes.remove()
        for axes, name in zip(panels, names):
            before, after = values[name]
            axes.semilogy(range(1, len(before) + 1), before.clamp_min(lowest), color=grey(theme), label="momentum")
            axes.semilogy(range(1, len(after) + 1), after, color=BRANCHES[theme]["muon"], label="orthogonalized")
            axes.set_title(_short(name), fontsize=7, fontweight="normal")
            axes.set_ylim(lowest / 2, 3)
        figure.supxlabel("index of the singular value, largest first", fontsize=9)
        figure.supylabel("singular value", fontsize=9)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
        return figure

    return draw


def _short(name: str) -> str:
    """Return a name that fits a panel, cut on the left: its end tells the layers of a block apart."""
    return name if len(name) <= 34 else f"…{name[-33:]}"
