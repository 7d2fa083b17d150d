"""Make docs/performance.md from all timings in benchmarks/results; none of it is typed by hand.

python -m tools.pages.performance [--check]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.pages import markdown
from tools.pages.generated import write_or_check
from tools.pages.lab_tables import lab_tables
from tools.pages.tables import sweep_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results"

INTRODUCTION = """\
# Performance

Every figure on this page comes from a file in [benchmarks/results]({results}), and was measured at the commit named
beside it. `python -m tools.pages.performance` makes the page from these files. `make gpu-lab` makes the file of a GPU,
`benchmarks/sweep_*.py` make the others. A value after ± is the spread of the measurements. Ranges are quartiles, or the
smallest and the largest of several seeds.

| column | meaning |
| --- | --- |
| of copy | the rate at which bytes move, as a share of that of a plain copy |
| dtypes | of the momentum or parameter, and of the packed directions |
| foreach / ours | the time of `torch._foreach_*` for the same work, divided by ours |
| ideal ms | the time of the FLOPs, with half of each symmetric product's, at the rate of torch's large product |
| of ideal | ideal ms as a share of the measured time; above 100 % where ours is faster than torch's large product |
| error | the distance of a first update from the exact one, as a share of its norm |
| host ms / 100 matrices | the time that the host needs besides products |
| predicted ms | the time by the [model](predictions.md), without the host's |
| torch products predicted, ms | the same of the iteration over torch's products |
| peak MB | the most that torch has given out at a moment of one step, less what it had given out before the step |
| kernels | how many were launched, on GPUs only: on real ones without copies and fills, on fake ones with them |
| of passes | the bytes an element that passes over memory move, without those of products |
| ms predicted, of goal | the time of a step by the [model](predictions.md), and the goal for it |
| over the first | time divided by that of the first build, in the same round |
| parts, blocks | parts of matrices that a rank holds; pieces that an owner copies between messages and batches |
"""


def page(results: Path, beside: Path) -> str:
    """Return the page for the files in `results` that have timings, with links relative to the folder `beside`."""
    parts = [INTRODUCTION.format(results=link(results, beside))]
    for file in sorted(results.glob("*.json")):
        content = json.loads(file.read_text())
        if "lab" in content or "results" in content:
            parts.append("\n".join(section(file, content, beside)))
    return "\n".join(parts)


def section(file: Path, content: dict, beside: Path) -> Iterator[str]:
    """Yield the lines about one file: its machine, versions and commit, its tables and its figures."""
    yield f"## {file.stem}\n"
    yield f"{origin(content)} [The file]({link(file, beside)}).\n"
    tables = lab_tables(content) if "lab" in content else sweep_tables(content, file.stem)
    for table in tables:
        yield f"### {table.title}\n\n{markdown.table(table.headings, table.rows)}\n"
    for figure in sorted(file.parent.glob(f"{file.stem}-*.png")):
        yield f"![{figure.stem}]({link(figure, beside)})\n"


def origin(content: dict) -> str:
    """Return the machine, versions and commit with which a file was measured, as far as the file says."""
    facts = {**content, **content.get("lab", {})}
    package = content.get("versions", {}).get("optimizer", {})
    device = facts.get("device") or content.get("machine", {}).get("cpu", "an unnamed machine")
    versions = {**{name: facts.get(name) for name in ("torch", "triton", "cuda")}, **content.get("versions", {})}
    named = [f"{name} {versions[name]}" for name in ("torch", "triton", "cuda") if versions.get(name)]
    threads = facts.get("threads") or content.get("machine", {}).get("threads")
    if threads and "lab" not in content:
        named.append(f"{threads} threads" if threads > 1 else "1 thread")
    if "work_dtype" in content:
        named.append(f"products in {content['work_dtype']}")
    commit = str(facts.get("commit") or package.get("commit") or package.get("source_commit") or "unknown")
    return f"{device}, {', '.join(named)}; {markdown.commit_words(commit, facts.get('dirty', package.get('dirty')))}."


def link(file: Path, beside: Path) -> str:
    return Path(os.path.relpath(file, beside)).as_posix()


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(RESULTS, PAGE.parent), "Make docs/performance.md from the results."))
