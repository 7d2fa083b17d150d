"""The figures of a report: share of the ideal by size, speed-up over peers, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(content: dict, stem: Path) -> Iterator[Path]:
    """Draw each figure for which the report has data into `<stem>-<what>.png`; yield the files."""
    for what, figure in (("ideal", share_of_ideal), ("peers", speed_ups), ("step", step_times)):
        axes = figure(content)
        if axes is not None:
            file = stem.with_name(f"{stem.name}-{what}.png")
            axes.figure.savefig(file, dpi=120, bbox_inches="tight")
            plt.close(axes.figure)
            yield file


def sweep_rows(content: dict, sweep: str) -> list[dict]:
    """Return the rows that a sweep has measured against peers; none if it did not run."""
    values = [record["value"] for record in content["stages"].get("measure", []) if record["key"] == sweep]
    rows = values[0].get("results") if values and values[0] else None
    return [row for row in rows if "contestants" in row] if isinstance(rows, list) else []


def squares(content: dict) -> list[tuple[int, dict]]:
    """Return side and row of each square for which orthogonalization was measured, small ones first."""
    rows = [(*row["shape"][1:], row) for row in sweep_rows(content, "orthogonalize")]
    return sorted(((m, row) for m, n, row in rows if m == n), key=lambda pair: pair[0])


def dense_rates(content: dict) -> dict[str, float]:
    """Return the measured rate of dense products in FLOP a second, by dtype."""
    records = {record["key"]: record["value"] for record in content["stages"].get("environment", [])}
    dense = {key.split()[1]: value for key, value in records.items() if key.startswith("dense") and value}
    return {dtype: 1e12 * value["tera_flops"] for dtype, value in dense.items()}


def tuned(content: dict) -> dict[str, list[dict]]:
    """Return the tuned entries of the symmetric product with k = m, by dtype."""
    groups: dict[str, list[dict]] = {}
    for record in content["stages"].get("tune", []):
        entry = record["value"] or {}
        if "tile" in entry and "seconds" in entry and entry["m"] == entry["k"]:
            groups.setdefault(record["key"].split()[1], []).append(entry)
    return {dtype: sorted(entries, key=lambda e: e["m"]) for dtype, entries in groups.items()}


def share_of_ideal(content: dict) -> plt.Axes | None:
    """The time of the FLOPs that symmetry leaves, at the rate of dense products, divided by the time taken."""
    rates, entries, axes = dense_rates(content), tuned(content), None
    for dtype in sorted(entries.keys() & rates.keys()):
        axes = axes or new_axes("Against the ideal", "side", "share of the ideal")
        # For square matrices two products are timed, b A + c A² and A B.
        ideal = [2 * entry["count"] * entry["m"] ** 3 / rates[dtype] for entry in entries[dtype]]
        shares = [seconds / entry["seconds"] for seconds, entry in zip(ideal, entries[dtype])]
        axes.plot([entry["m"] for entry in entries[dtype]], shares, marker="o", label=f"symmetric product, {dtype}")
    measured = squares(content)
    if measured:
        axes = axes or new_axes("Against the ideal", "side", "share of the ideal")
        axes.plot(*zip(*((m, row["share_of_ideal"]) for m, row in measured)), marker="s", label="orthogonalize")
    return finished(axes)


def speed_ups(content: dict) -> plt.Axes | None:
    """Times of peers divided by ours, by side: of torch's product, and of every other orthogonalization."""
    lines = {f"product, {dtype}": [(e["m"], e["gain"]) for e in entries] for dtype, entries in tuned(content).items()}
    for m, row in squares(content):
        for peer, outcome in list(row["contestants"].items())[1:]:
            if isinstance(outcome, dict):
                lines.setdefault(peer, []).append((m, outcome["ratio"][1]))
    axes = new_axes("Against peers", "side", "their time / ours") if lines else None
    for label, points in lines.items():
        axes.plot(*zip(*points), marker="o", label=label)
    return finished(axes)


def step_times(content: dict) -> plt.Axes | None:
    """Where the time of a step goes, for each model."""
    rows = [row for row in sweep_rows(content, "step") if "breakdown" in row]
    if not rows:
        return None
    axes = new_axes("Muon's step", "", "ms", scale="linear")
    below = [0.0] * len(rows)
    for piece in (name for name in rows[0]["breakdown"] if name != "whole"):
        heights = [row["breakdown"][piece] for row in rows]
        axes.bar([row["case"] for row in rows], heights, bottom=below, label=piece)
        below = [a + b for a, b in zip(below, heights)]
    return finished(axes)


def new_axes(title: str, across: str, up: str, scale: str = "log") -> plt.Axes:
    _, axes = plt.subplots(figsize=(6, 4))
    axes.set(title=title, xlabel=across, ylabel=up)
    if scale == "log":
        axes.set_xscale("log", base=2)
    return axes


def finished(axes: plt.Axes | None) -> plt.Axes | None:
    if axes is not None:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return axes
