"""The tables of docs/numerics.md, written between its markers from a results file; none of them is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tools.pages.markdown import commit_words, fill, table


def filled(page: str, results: dict, file: str) -> str:
    """Return `page` with the text between each pair of markers replaced by tables of `results`, which are in `file`.

    Raises ValueError for a marker that names no table, and for a table that has no marker.
    """
    made = {name: make(results) for name, make in TABLES.items()} | {"source": source(results, file)}
    return fill(page, {f"numerics: {name}": text for name, text in made.items()})


def source(results: dict, file: str) -> str:
    m, n = results["size"]
    return (
        f"[The file]({file}): {results['device']}, torch {results['torch']}, "
        f"{commit_words(results['commit'], results['dirty'])};\n"
        f"matrices of {m} x {n}, errors as the root mean square over {len(results['seeds'])} seeds."
    )


def errors(results: dict) -> str:
    rows = [row for row in results["errors"] if row["schedule"] == "polar_express"]
    return by_case(rows, "spectrum", "singular values", lambda group: group[0]["error"])


def schedules(results: dict) -> str:
    return by_case(results["errors"], "schedule", "schedule", lambda group: worst(row["error"] for row in group))


def by_case(rows: Sequence[dict], key: str, heading: str, value: Callable[[list[dict]], float | None]) -> str:
    """Return a table with a row for each `key` and a column for each dtype and method."""
    cases = unique((row["dtype"], row["method"]) for row in rows)
    lines = []
    for name in unique(row[key] for row in rows):
        groups = [[r for r in rows if r[key] == name and (r["dtype"], r["method"]) == case] for case in cases]
        lines.append([words(name), *(power(value(group)) for group in groups)])
    return table([heading, *(f"{dtype} `{method}`" for dtype, method in cases)], lines)


def bands(results: dict) -> str:
    steps = unique(row["steps"] for row in results["bands"])
    rows = {(row["schedule"], row["steps"]): row for row in results["bands"]}
    names = unique(row["schedule"] for row in results["bands"])
    cells = [[rows[name, count] for count in steps] for name in names]
    lines = [
        [words(name), *(f"{row['low']:.4f} to {row['high']:.4f}" for row in line)] for name, line in zip(names, cells)
    ]
    return table(["schedule", *(f"{count} steps" for count in steps)], lines)


def restarts(results: dict) -> str:
    rows = [row for row in results["restarts"] if row["schedule"] == "polar_express"]
    dtypes = unique(row["dtype"] for row in rows)
    lines = []
    for chosen in unique(named(row["restarts"]) for row in rows):
        dtype_rows = {row["dtype"]: row for row in rows if named(row["restarts"]) == chosen}
        cells = [(dtype_rows[dtype]["bound"], dtype_rows[dtype]["error"]) for dtype in dtypes]
        bare = chosen == "standard"
        lines.append(
            [chosen, *(text for bound, error in cells for text in ("" if bare else power(bound), power(error)))]
        )
    return table(["windows", *(text for dtype in dtypes for text in (f"{dtype}: bound", "error"))], lines)


def named(chosen: Sequence[int] | None, steps: int = 5) -> str:
    """Return the lengths of the windows, as `str(Iteration)` writes them."""
    if chosen is None:
        return "standard"
    bounds = [0, *chosen, steps]
    return "gram[" + "+".join(str(stop - start) for start, stop in zip(bounds, bounds[1:])) + "]"


def scales(results: dict) -> str:
    parts = {"product": "X Xᵀ", "standard": "`standard`", "gram": "`gram[2+3]`"}
    columns = [(f"{part}_{label}", f"{text}, {label}") for part, text in parts.items() for label in ("without", "with")]
    lines = [
        [str(row["m"]), f"{row['scale']:g}", *(power(row[key], missing="") for key, _ in columns)]
        for row in results["scales"]
    ]
    return table(["m", "scale", *(heading for _, heading in columns)], lines)


def words(name: str) -> str:
    return name if "_" not in name else f"`{name}`"


def power(number: float | None, missing: str = "not finite") -> str:
    """Return two digits, which is as many as repeat on another processor."""
    if number is None:
        return missing
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def worst(numbers: Iterable[float | None]) -> float | None:
    candidates = list(numbers)
    return None if None in candidates else max(candidates)


def unique(values: Iterable) -> list:
    return list(dict.fromkeys(values))


TABLES = {
    "errors": errors,
    "schedules": schedules,
    "bands": bands,
    "restarts": restarts,
    "scales": scales,
}
