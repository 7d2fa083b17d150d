"""What the columns of tables of results show, by the kind of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


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


def target(key: str, unit: str) -> Column:
    """Return the column of what a row shall take at most; results of older sweeps do not say it."""
    return Column(f"target, {unit}", lambda r: words(r.get(key)))


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
            target("target_milliseconds_per_100_matrices", "ms / 100 matrices"),
            Column("over the first", lambda r: quartile_words(r.get("over_first"))),
        ),
    ),
    ("microseconds",): (
        "Host time of a launch",
        (
            Column("product", lambda r: r["case"]),
            Column("µs (quartiles)", lambda r: quartile_words(r["microseconds"])),
            target("target_microseconds", "µs"),
        ),
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
            target("target_seconds", "s"),
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
            target("target_milliseconds", "ms"),
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
            target("target_milliseconds", "ms"),
            *(Column(key, lambda r, key=key: words(r.get(key))) for key in ("chunks", "messages", "parts", "blocks")),
        ),
    ),
    ("seconds", "megabytes", "target_seconds"): (
        "The plan of one rank among thousands",
        (
            Column("case", lambda r: r["case"]),
            Column("s", lambda r: with_target(r, "seconds", "target_seconds")),
            Column("MB", lambda r: with_target(r, "megabytes", "target_megabytes")),
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
            Column("predicted us", lambda r: micro(r, "predicted_")),
            Column("torch us", lambda r: micro(r, "torch_")),
            Column("torch predicted us", lambda r: micro(r, "predicted_torch_")),
            Column("TFLOP/s, dense", lambda r: words(r["tera_flops"])),
            Column("torch / ours", lambda r: words(r["gain"])),
            Column("problems", lambda r: "; ".join(r["problems"])),
        ),
    ),
}
