"""The common style of figures for a page, as settings of matplotlib; each page adds its own."""

from __future__ import annotations

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
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,
}
