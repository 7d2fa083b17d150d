"""How the pictures look on a light and on a dark page, and how they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from tools.pages.figure_style import STYLE

# From Okabe and Ito's palette, told apart with every kind of colour vision; on dark pages its lighter members.
BRANCHES = {"light": {"muon": "#0072B2", "fallback": "#D55E00"}, "dark": {"muon": "#56B4E9", "fallback": "#E69F00"}}
SERIES = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"),
    "dark": ("#56B4E9", "#E69F00", "#3BC99B", "#E39BC4", "#7FA8FF", "#F0E442"),
}
_PAGES = {"light": ("#ffffff", "#1f2328", "#767676"), "dark": ("#0d1117", "#e6edf3", "#8b949e")}

NAMES = {"muon": "Muon", "adamw": "AdamW", "nadamw": "NAdamW"}

# Draws a figure for a theme, "light" or "dark".
Drawing = Callable[[str], Figure]


def settings(theme: str) -> dict[str, object]:
    """Return matplotlib's settings for a theme."""
    page, text, edge = _PAGES[theme]
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), text)
    pages = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), page)
    return {**STYLE, **colours, **pages, "axes.edgecolor": edge, "savefig.dpi": 150, "svg.hashsalt": "draw"}


def named(branch: str) -> str:
    """Return what a branch is called in pictures; one that is not known here by its own name."""
    return NAMES.get(branch, branch)


def grey(theme: str) -> str:
    """Return the colour of what is only for comparison."""
    return _PAGES[theme][2]


def save(name: str, draw: Drawing, folder: Path) -> list[Path]:
    """Write `<name>-<theme>.png` and `.svg` into `folder`, which is made; return their paths.

    The same picture is the same file: without dates and versions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for theme in BRANCHES:
        with matplotlib.rc_context(settings(theme)):
            figure = draw(theme)
            written += [folder / f"{name}-{theme}.{kind}" for kind in ("png", "svg")]
            figure.savefig(written[-2], metadata={"Software": None})
            figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
    return written
