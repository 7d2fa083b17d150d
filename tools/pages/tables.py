"""The results of sweeps as tables of words, for the terminal and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# The key of a contestant's time over that of ours after a warm-up.
WARMED_UP = "ratio_to_warmed_up"
# What rows without results are called, by how their status begins.
LACKING = {"unmeasured": "unmeasured", "error": "with an error"}


class Table(NamedTuple):
    """A title, headings, and rows of one word for each heading."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Column(NamedTuple):
    """A heading, and a function that makes a row's cell for it."""

    heading: str
    show: Callable[[dict], str]


def words(value: object) -> str:
    """Return a value of a result file as it is read."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return " x ".join(map(words, value))
    return "" if value is None else str(value)


def micro(row: dict, name: str) -> str:
    """Return seconds of a row in microseconds, with their spread where it is known."""
    seconds, spread = row.get(f"{name}seconds"), row.get(f"{name}spread")
    if seconds is None:
        return ""
    return f"{1e6 * seconds:.1f}" + (f" ±{spread:.0%}" if spread is not None else "")


def quartile_words(quartiles: Sequence[float] | None) -> str:
    """Return a median with its quartiles, nothing where nothing was measured."""
    return "" if quartiles is None else "{1:.2f} ({0:.2f}-{2:.2f})".format(*quartiles)


def with_target(row: dict, name: str, target: str) -> str:
    """Return what was measured and what it shall be at most, nothing where nothing was measured."""
    return "" if row.get(name) is None else f"{row[name]:.2f} of {words(row.get(target))}"


# How the rows of each kind of results are shown, by the keys that they have.
KINDS: dict[tuple[str, ...], tuple[str, tuple[Column, ...]]] = {
    ("operation", "foreach_seconds", "copied_bytes"): (
        "Bookkeeping of a step",
        (
            Column("operation", lambda r: r["operation"]),
            # Files of sweeps that wrote all rows at their end have the matrices under "case".
            Column("matrices", lambda r: r.get("matrices", r["case"])),
            Column("dtypes", lambda r: r["dtypes"]),
            Column("ms", lambda r: f"{1e3 * r['seconds']:.3f} ±{r['spread']:.0%}"),
            Column("GB/s", lambda r: f"{r['bytes'] / r['seconds'] / 1e9:.1f}"),
            Column("of copy", lambda r: f"{r['share_of_copy']:.0%}"),
            Column("foreach / ours", lambda r: f"{r['speed_up']:.2f}"),
        ),
    ),
    ("host_milliseconds", "over_first"): (
        "Host time of a step",
        (
            Column("case", lambda r: r["case"]),
            Column("ms (quartiles)", lambda r: quartile_words(r.get("host_milliseconds"))),
            Column("ms / 100 matrices", lambda r: words(r.get("host_milliseconds_per_100_matrices"))),
            Column("over the first", lambda r: quartile_words(r.get("over_first"))),
        ),
    ),
    ("microseconds",): (
        "Host time of a launch",
        (Column("product", lambda r: r["case"]), Column("µs (quartiles)", lambda r: quartile_words(r["microseconds"]))),
    ),
    ("portable_seconds", "ratio"): (
        "Operations without a compiled library",
        (
            *(Column(key, lambda r, key=key: r[key]) for key in ("operation", "matrices", "dtypes")),
            Column("compiled, ms", lambda r: f"{1e3 * r['seconds']:.3f} ±{r['spread']:.0%}"),
            Column("portable, ms", lambda r: f"{1e3 * r['portable_seconds']:.3f} ±{r['portable_spread']:.0%}"),
            Column("portable / compiled", lambda r: f"{r['ratio']:.2f}"),
        ),
    ),
    ("load_seconds",): (
        "Time to load",
        (
            Column("what is loaded", lambda r: r["case"]),
            Column("CPU s (quartiles)", lambda r: quartile_words(r["load_seconds"])),
        ),
    ),
    ("compiler_seconds", "gpu_code_kib"): (
        "Builds",
        (
            Column("variant for", lambda r: r["case"]),
            Column("compilers, CPU s", lambda r: f"{r['compiler_seconds']:.0f}"),
            Column("library, KiB", lambda r: words(r["library_kib"])),
            Column("variant, KiB", lambda r: words(r["variant_kib"])),
            Column(
                "machine code for GPUs, KiB",
                lambda r: ", ".join(f"{gpu} {kib}" for gpu, kib in r["gpu_code_kib"].items()),
            ),
        ),
    ),
    ("milliseconds", "batches"): (
        "Host time of a model's step, launches included",
        (
            *(Column(key, lambda r, key=key: words(r[key])) for key in ("case", "matrices", "batches")),
            Column("ms (quartiles)", lambda r: quartile_words(r["milliseconds"])),
        ),
    ),
    ("kernels", "syncs"): (
        "One step on a fake GPU: launches and predicted time",
        (
            *(Column(key, lambda r, key=key: words(r[key])) for key in ("model", "way", "kernels")),
            Column("bytes an element", lambda r: f"{r['bytes_an_element']:.0f}"),
            Column("of passes", lambda r: f"{r['pass_bytes_an_element']:.0f}"),
            Column("waits for the device", lambda r: words(r["syncs"])),
            Column("ms predicted, of goal", lambda r: with_target(r, "predicted_milliseconds", "goal_milliseconds")),
        ),
    ),
    ("plan_seconds", "host_milliseconds"): (
        "Planning and host time of one rank among many",
        (
            Column("case", lambda r: r["case"]),
            Column("plan, s", lambda r: with_target(r, "plan_seconds", "target_seconds")),
            Column("MB", lambda r: with_target(r, "plan_megabytes", "target_megabytes")),
            Column("step, ms (quartiles)", lambda r: quartile_words(r.get("host_milliseconds"))),
            Column("target, ms", lambda r: words(r.get("target_milliseconds"))),
            *(Column(key, lambda r, key=key: words(r.get(key))) for key in ("chunks", "messages", "parts", "blocks")),
        ),
    ),
    ("step_milliseconds", "share", "contestant"): (
        "The optimizer's share of a training step",
        (
            Column("model", lambda r: r["model"]),
            Column("optimizer", lambda r: r["contestant"]),
            Column(
                "forward + backward, ms (quartiles)", lambda r: quartile_words(r.get("forward_backward_milliseconds"))
            ),
            Column("step, ms (quartiles)", lambda r: quartile_words(r.get("step_milliseconds"))),
            Column("share (quartiles)", lambda r: quartile_words(r["share"]) if "share" in r else r["status"]),
        ),
    ),
    ("tera_flops", "gain", "torch_seconds", "problems"): (
        "X Xᵀ by the symmetric kernel",
        (
            Column("dtype", lambda r: r["dtype"]),
            Column("batch x m x k", lambda r: words(r["shape"])),
            Column("us", lambda r: micro(r, "")),
            Column("torch us", lambda r: micro(r, "torch_")),
            Column("TFLOP/s, dense", lambda r: words(r["tera_flops"])),
            Column("torch / ours", lambda r: words(r["gain"])),
            Column("problems", lambda r: "; ".join(r["problems"])),
        ),
    ),
}


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
        return
    reasons = [LACKING.get(row.get("status", "").partition(":")[0]) for row in rows]
    measured = [row for row, reason in zip(rows, reasons) if reason is None]
    for keys, (title, columns) in KINDS.items():
        if measured and all(key in measured[0] for key in keys):
            shown = [tuple(column.show(row) for column in columns) for row in measured]
            title += "".join(f", {reasons.count(r)} of {len(rows)} {r}" for r in LACKING.values() if r in reasons)
            yield Table(title, tuple(column.heading for column in columns), shown)
            return
    plain = [key for key, value in rows[0].items() if not isinstance(value, dict)]
    yield Table(name, tuple(plain), [tuple(words(row.get(key)) for key in plain) for row in rows])


def training_tables(results: dict[str, dict]) -> Iterator[Table]:
    """Yield the table of optimizers that trained one model, each at the best of the learning rates that were tried."""
    shown = []
    for name, found in results.items():
        loss, step = found["validation_loss"], found["median_ms_per_step"]
        losses = f"{loss['mean']:.3f} ({loss['min']:.3f} to {loss['max']:.3f})"
        shown.append((name, words(found["lr"]), losses, *(f"{step[part]:.2f}" for part in step)))
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
    compared = [peer for outcomes in raced.values() for peer, found in outcomes.items() if to_warmed_up(found)]
    names = list(dict.fromkeys(compared))
    if names:
        shown = [(case, *(ratio(outcomes[peer], WARMED_UP) for peer in names)) for case, outcomes in raced.items()]
        headings = "case", *(f"{peer} / warmed up" for peer in names)
        yield Table(f"{name}: others and ours after `warmup()`", headings, shown)


def to_warmed_up(outcome: dict | str) -> bool:
    """Whether a contestant has run beside ours after its warm-up."""
    return isinstance(outcome, dict) and outcome.get(WARMED_UP) is not None


def ratio(outcome: dict | str, key: str = "ratio") -> str:
    """Return the median of a peer's time over ours, with its quartiles, or why there is none."""
    return outcome if isinstance(outcome, str) else quartile_words(outcome.get(key))
