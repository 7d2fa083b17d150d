"""The results of sweeps as tables of words, for the terminal and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tools.pages.columns import KINDS, Column, quartile_words, words

# The key of a contestant's time over that of ours after a warm-up.
WARMED_UP = "ratio_to_warmed_up"
# What rows without results are called, by how their status begins.
LACKING = {"unmeasured": "unmeasured", "error": "with an error"}


class Table(NamedTuple):
    """A title, headings, and rows of one word for each heading."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sweep_tables(content: dict, name: str = "Results") -> Iterator[Table]:
    """Yield the table of a sweep's results; a kind that has no columns of its own shows its plain values."""
    rows = content.get("results")
    if isinstance(rows, dict):
        yield from training_tables(rows)
        return
    if not rows:
        return
    if any("contestants" in row for row in rows):
        yield contest_table(rows, name)
        yield from warmed_up_tables(rows, name)
        yield from pieces_tables(rows)
        return
    reasons = [LACKING.get(row.get("status", "").partition(":")[0]) for row in rows]
    measured = [row for row, reason in zip(rows, reasons) if reason is None]
    for keys, (title, columns) in KINDS.items():
        if measured and all(key in measured[0] for key in keys):
            cells = ((column.heading, *map(column.show, measured)) for column in columns)
            headings, *shown = zip(*(column for column in cells if any(column[1:])))
            title += "".join(f", {reasons.count(r)} of {len(rows)} {r}" for r in LACKING.values() if r in reasons)
            yield Table(title, headings, shown)
            return
    plain = [key for key, value in rows[0].items() if not isinstance(value, dict)]
    yield Table(name, tuple(plain), [tuple(words(row.get(key)) for key in plain) for row in rows])


def training_tables(results: dict[str, dict]) -> Iterator[Table]:
    """Yield the table of optimizers that trained one model, each at the best of the learning rates that were tried."""
    shown = []
    for name, run in results.items():
        loss, step = run["validation_loss"], run["median_ms_per_step"]
        losses = f"{loss['mean']:.3f} ({loss['min']:.3f} to {loss['max']:.3f})"
        shown.append((name, words(run["lr"]), losses, *(f"{step[part]:.2f}" for part in step)))
    parts = next(iter(results.values()))["median_ms_per_step"]
    headings = ("optimizer", "learning rate", "validation loss", *(f"{part.replace('_', ' ')}, ms" for part in parts))
    yield Table("Training", headings, shown)


def predicted_columns(rows: list[dict]) -> list[Column]:
    """Return columns with the times that the model predicts for ours and for torch's products, if it has any."""
    kinds = {"predicted ms": "predicted_milliseconds", "torch products predicted, ms": "predicted_torch_milliseconds"}
    known = {heading: key for heading, key in kinds.items() if any(row.get(key) is not None for row in rows)}
    return [Column(heading, lambda r, key=key: words(r.get(key))) for heading, key in known.items()]


def contest_table(rows: list[dict], name: str) -> Table:
    """Return the table of a sweep against peers: ours first, then each one's time over ours, with its quartiles.

    A peer that the sweep was not asked for has no column.
    """
    measured = next(row for row in rows if "contestants" in row)
    ours, *peers = measured["contestants"]
    raced = [row["contestants"] for row in rows if "contestants" in row]
    peers = [peer for peer in peers if any(outcomes[peer] != "unmeasured" for outcomes in raced)]
    columns = [
        Column("ms", lambda r: f"{r['milliseconds']:.3f}"),
        *predicted_columns(rows),
        Column("ideal ms", lambda r: f"{r['ideal_milliseconds']:.3f}"),
        Column("of ideal", lambda r: f"{r['ideal_milliseconds'] / r['milliseconds']:.0%}"),
        Column("error", lambda r: words(r["contestants"][ours].get("error"))),
    ]
    if "host_milliseconds_per_100_matrices" in measured:
        columns += [
            Column("host ms / 100 matrices", lambda r: f"{r['host_milliseconds_per_100_matrices']:.2f}"),
            Column("peak MB", lambda r: f"{r['contestants'][ours]['peak_bytes'] / 1e6:.1f}"),
            Column("kernels", lambda r: words(r["contestants"][ours]["kernels"])),
        ]
    columns += [Column(f"{peer} / ours", lambda r, peer=peer: ratio(r["contestants"][peer])) for peer in peers]
    shown = []
    for row in rows:
        cells = (c.show(row) for c in columns) if "contestants" in row else [row["status"]] + [""] * (len(columns) - 1)
        shown.append((row["case"], *cells))
    return Table(f"{name}: ours and others", ("case", *(column.heading for column in columns)), shown)


def warmed_up_tables(rows: list[dict], name: str) -> Iterator[Table]:
    """Yield the table of each one's time over ours after its warm-up, if a sweep has measured that."""
    raced = {row["case"]: row["contestants"] for row in rows if "contestants" in row}
    compared = [peer for outcomes in raced.values() for peer, outcome in outcomes.items() if to_warmed_up(outcome)]
    names = list(dict.fromkeys(compared))
    if names:
        shown = [(case, *(ratio(outcomes[peer], WARMED_UP) for peer in names)) for case, outcomes in raced.items()]
        headings = "case", *(f"{peer} / warmed up" for peer in names)
        yield Table(f"{name}: others and ours after `warmup()`", headings, shown)


def pieces_tables(rows: list[dict]) -> Iterator[Table]:
    """Yield the table of where our step's time goes, in a run of its own, if a sweep has measured that."""
    breakdowns = {row["case"]: row["breakdown"] for row in rows if "breakdown" in row}
    if not breakdowns:
        return
    kinds = dict.fromkeys(kind for pieces in breakdowns.values() for kind in pieces if kind != "whole")
    shown = [kind for kind in kinds if any(pieces.get(kind) for pieces in breakdowns.values())]
    cells = [
        (case, *(words(pieces.get(kind, 0.0)) for kind in ("whole", *shown))) for case, pieces in breakdowns.items()
    ]
    yield Table("Where our step's milliseconds go", ("case", "ms", *shown), cells)


def to_warmed_up(outcome: dict | str) -> bool:
    """Whether a contestant has run beside ours after its warm-up."""
    return isinstance(outcome, dict) and outcome.get(WARMED_UP) is not None


def ratio(outcome: dict | str, key: str = "ratio") -> str:
    """Return the median of a peer's time over ours, with its quartiles, or why there is none."""
    return outcome if isinstance(outcome, str) else quartile_words(outcome.get(key))
