"""The tables of the scale report: planned, predicted and measured figures of each case, and those of other schemes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.pages import markdown
from tools.scale.plans import IN_FLIGHT, STEPS, Case
from tools.scale.schemes import TOKENS, Row

# The numbers of GPUs in the tables; the figure has all.
SHOWN = (8, 64, 256, 1024, 4096)
HEAD = [
    "model",
    "GPUs",
    "products",
    "planned:<br>chunks",
    "MiB sent",
    "MiB held",
    "TFLOP",
    "imbalance",
    "predicted:<br>ms",
    "% of a training step",
    "measured:<br>ms of the host",
]


def tables(results: dict, host: Mapping[str, float]) -> dict[str, str]:
    """Return the tables by the names of their markers. `host` has measured milliseconds by case."""
    rows = [Row(**row) for row in results["rows"]]
    shown = [row for row in rows if row.gpus in SHOWN] or rows
    return {"scale": f"{_cases(shown, host)}\n\n{_said(results)}", "schemes": _schemes(shown)}


def _cases(rows: Sequence[Row], host: Mapping[str, float]) -> str:
    lines = []
    for row in rows:
        case = Case(row.model, row.gpus, row.dtype, row.team)
        measured = host.get(str(case))
        seconds = row.seconds["in chunks"]
        planned = [f"{row.sent_bytes / 2**20:,.0f}", f"{row.held_bytes / 2**20:,.0f}", f"{row.flop / 1e12:.1f}"]
        planned = [str(row.chunks), *planned, f"{row.imbalance:.2f}"]
        predicted = [f"{1e3 * seconds:,.0f}", f"{100 * seconds / row.training_seconds:.1f}"]
        host_time = "-" if measured is None else f"{measured:.1f}"
        lines.append([row.model, f"{row.gpus:,}", case.products, *planned, *predicted, host_time])
    return markdown.table(HEAD, lines, numbers=True)


def _schemes(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if (row.dtype, row.team) == (rows[0].dtype, 1)]
    names = [name for name in rows[0].seconds if name != "in chunks"]
    head = ["model", "GPUs", *("planned, ms" if name == "at best" else f"{name}, ms" for name in names)]
    lines = [[row.model, f"{row.gpus:,}", *(f"{1e3 * row.seconds[name]:,.0f}" for name in names)] for row in rows]
    return markdown.table(head, lines, numbers=True)


def _said(results: Mapping[str, Any]) -> str:
    machine, planned = results["machine"], markdown.commit_words(results["commit"], results["dirty"])
    sending = f"a GPU sends {machine['link_gb_per_s']:g} GB/s"
    latency = f"a collective takes {machine['microseconds_per_peer']:g} µs per peer"
    return (
        f"Assumed: {sending}, {latency}, and products run at {machine['tflop_per_s']:g} TFLOP/s, also in the\n"
        f"training step. That step has {TOKENS / 1e6:g}M tokens, each with 6 FLOP for every parameter that is used for "
        f"it. Muon takes {STEPS} steps\nof the iteration, and {IN_FLIGHT} chunks travel while one is worked on. "
        f"Planned at {planned}."
    )
