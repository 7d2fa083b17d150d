"""The records of the lab, which proves and tunes on a GPU, as tables of words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.pages.columns import micro, words
from tools.pages.tables import Table, sweep_tables

# `cut`: time ended before the item did.
VERDICTS = ("ok", "failed", "skipped", "cut")


def lab_tables(content: dict) -> Iterator[Table]:
    """Yield the tables of a report of the lab."""
    stages = content["stages"]
    yield from environment_tables(stages.get("environment", []))
    yield from verdict_tables(stages)
    yield from tuned_tables(stages.get("tune", []))
    for record in stages.get("measure", []):
        if record["value"]:
            yield from sweep_tables(record["value"], record["key"])


def environment_tables(records: Sequence[dict]) -> Iterator[Table]:
    rows = []
    for record in records:
        for key, value in (record["value"] or {}).items():
            rows.append((record["key"], key, words(value)))
    if rows:
        yield Table("Environment and ceilings", ("what", "", "value"), rows)


def verdict_tables(stages: dict[str, list[dict]]) -> Iterator[Table]:
    counts = []
    for stage, records in stages.items():
        statuses = [record["status"] for record in records]
        counts.append((stage, *(str(statuses.count(status)) for status in VERDICTS)))
    yield Table("How many items of the lab succeeded", ("stage", *VERDICTS), counts)
    troubled = [record for records in stages.values() for record in records if record["problem"]]
    if troubled:
        rows = [(r["stage"], r["key"], r["status"], r["problem"].replace("\n", " ")[:200]) for r in troubled]
        yield Table("What failed, was skipped or cut", ("stage", "item", "verdict", "reason"), rows)


def tuned_tables(records: Sequence[dict]) -> Iterator[Table]:
    launches, methods = [], []
    for record in (r for r in records if r["value"] and r["status"] == "ok"):
        if record["key"].startswith("methods"):
            methods.append(method_row(record["value"]))
        elif "gain" in record["value"]:
            launches.append(launch_row(record["key"], record["value"]))
    if launches:
        times = "us", "predicted", "torch us", "predicted", "torch / ours"
        headings = ("kernel", "dtype", "batch x m x k", "configuration", *times, "candidates")
        yield Table("Tuned configurations", headings, launches)
    if methods:
        headings = ("batch x m x n", "standard us", "Gram us", "standard / Gram", "auto takes")
        yield Table("Standard or Gram iteration", headings, methods)


def launch_row(key: str, entry: dict) -> tuple[str, ...]:
    """Return the row of a tuned entry; its configuration is the fields that one of the kernels has."""
    fields = ("tile", "tile_k", "group", "side", "width", "depth", "warps", "stages", "sections", "on_chip")
    config = " ".join(f"{field} {entry[field]}" for field in fields if field in entry)
    kernel, dtype, _ = key.split()
    sizes = words([entry["count"], entry["m"], entry["k"]])
    times = (micro(entry, name) for name in ("", "predicted_", "other_", "predicted_other_"))
    return kernel, dtype, sizes, config, *times, f"{entry['gain']:.2f}", words(entry["candidates"])


def method_row(entry: dict) -> tuple[str, ...]:
    speed = entry["standard_seconds"] / entry["gram_seconds"]
    times = micro(entry, "standard_"), micro(entry, "gram_")
    return words([entry["batch"], entry["m"], entry["n"]]), *times, f"{speed:.2f}", entry["auto"]
