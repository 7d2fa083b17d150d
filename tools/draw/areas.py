"""Areas and bars of a checkpoint: who updates each parameter and how large it is, and what the state takes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .checkpoint import Entry
from .theme import BRANCHES, Drawing, named, settings

Box = tuple[float, float, float, float]  # x, y, width, height


def treemap(sizes: Sequence[float], box: Box) -> list[Box]:
    """Return a rectangle in `box` for each of `sizes`, with areas in their proportion, in halves of about equal sums.

    Sizes come in descending order, so that neighbours are about as large.
    """
    if len(sizes) < 2:
        return [box] * len(sizes)
    total, cut, first = sum(sizes), 1, sizes[0]
    while cut < len(sizes) - 1 and abs(first + sizes[cut] - total / 2) < abs(first - total / 2):
        first += sizes[cut]
        cut += 1
    x, y, width, height = box
    share = first / total
    if width >= height:
        halves = (x, y, width * share, height), (x + width * share, y, width * (1 - share), height)
    else:
        halves = (x, y, width, height * share), (x, y + height * share, width, height * (1 - share))
    return [*treemap(sizes[:cut], halves[0]), *treemap(sizes[cut:], halves[1])]


def routing(entries: Sequence[Entry]) -> Drawing:
    """Return the drawing of a treemap: an area for each parameter, in the colour of its branch."""
    ordered = sorted((entry for entry in entries if entry.elements), key=lambda entry: -entry.elements)
    if not ordered:
        raise ValueError("no parameter has a state, whose shape tells its size")
    muon = [entry for entry in ordered if entry.is_muon]
    rest = [entry for entry in ordered if not entry.is_muon]
    total = sum(entry.elements for entry in ordered)

    def draw(theme: str) -> Figure:
        figure = Figure(figsize=(7.6, 4.2))
        axes = figure.subplots()
        left = 0.0
        for branch, members in (("muon", muon), ("fallback", rest)):
            width = sum(entry.elements for entry in members) / total
            boxes = treemap([entry.elements for entry in members], (left * 7.6, 0.0, width * 7.6, 3.8))
            for entry, box in zip(members, boxes):
                _area(axes, entry, box, theme)
            if members:
                text = f"{named(members[0].branch)}: {width:.0%} of {total:,} elements"
                side = {"x": left * 7.6, "ha": "left"} if branch == "muon" else {"x": 7.6, "ha": "right"}
                axes.text(y=3.88, s=text, color=BRANCHES[theme][branch], va="bottom", **side)
            left += width
        axes.set(xlim=(0, 7.6), ylim=(0, 4.2))
        axes.axis("off")
        return figure

    return draw


def _area(axes: Axes, entry: Entry, box: Box, theme: str) -> None:
    x, y, width, height = box
    page = settings(theme)["axes.facecolor"]
    colour = BRANCHES[theme]["muon" if entry.is_muon else "fallback"]
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=page, linewidth=0.8))
    shape = "×".join(map(str, entry.shape))
    name = entry.name.removesuffix(".weight")
    in_two = "\n".join(name.rsplit(".", 1))
    # About 0.058 inches a letter of 7 points; a name that does not fit is left out, as the areas are what counts.
    for text in (f"{entry.name}\n{shape}", f"{name}\n{shape}", f"{in_two}\n{shape}", in_two, name.split(".")[-1]):
        lines = text.split("\n")
        if max(map(len, lines)) * 0.058 < width - 0.06 and len(lines) * 0.13 < height - 0.04:
            white = "white" if theme == "light" else "black"
            axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=7, color=white)
            return


def state_bytes(entries: Sequence[Entry]) -> dict[tuple[str, str], int]:
    """Return the bytes of each kind of state, by branch and key."""
    totals: dict[tuple[str, str], int] = {}
    for entry in entries:
        for key, value in entry.state.items():
            totals[entry.branch, key] = totals.get((entry.branch, key), 0) + value.nbytes
    return dict(sorted(totals.items(), key=lambda item: (item[0][0] != "muon", -item[1])))


def memory(entries: Sequence[Entry]) -> Drawing:
    """Return the drawing of a bar for each kind of state, in MiB."""
    totals = state_bytes(entries)
    if not totals:
        raise ValueError("no parameter has a state")

    def draw(theme: str) -> Figure:
        figure = Figure(figsize=(7.0, 0.34 * len(totals) + 0.9))
        axes = figure.subplots()
        for row, ((branch, _), count) in enumerate(totals.items()):
            axes.barh(row, count / 2**20, 0.7, color=BRANCHES[theme]["muon" if branch == "muon" else "fallback"])
            axes.annotate(_bytes(count), (count / 2**20, row), (4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(totals)), [f"{named(branch)}: {key}" for branch, key in totals])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel(f"MiB of state; {_bytes(sum(totals.values()))} in all")
        return figure

    return draw


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.4g} {units[0]}"
