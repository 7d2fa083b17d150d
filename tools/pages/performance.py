"""Make docs/performance.md from all timings in benchmarks/results; none of it is typed by hand.

python -m tools.pages.performance [--check]
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tools.pages import markdown
from tools.pages.generated import write_or_check
from tools.pages.lab_tables import lab_tables
from tools.pages.tables import Table, sweep_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results"

INTRODUCTION = """\
# Performance

For people who want to know how fast the optimizer is on which machine. Every figure comes from a file in
[benchmarks/results]({results}), made at the commit that is named beside it. What is called *predicted* was not
measured. `python -m tools.pages.performance` makes the page from these files. `make gpu-lab` makes the file of a GPU,
`make demo` that of the character model, and `benchmarks/sweep_*.py` make the others. A value after ± is the spread of
the measurements. Ranges are quartiles, or the smallest and the largest of several seeds. A size 12x2304x768 means 12
matrices of 2304 rows and 768 columns.

| column | meaning |
| --- | --- |
| torch.optim.Muon / ours, and others / ours | the other's time divided by ours: above 1, ours is faster |
| of copy | the rate at which bytes move, as a share of that of a plain copy |
| dtypes | of the momentum or parameter, and of the packed directions |
| foreach / ours | the time of `torch._foreach_*` for the same work, divided by ours |
| ideal ms | the time of the cheapest method's FLOPs, with half of each symmetric product's, at the rate of torch's \
large product. In files older than 2026-11-30 it is the standard iteration's in bfloat16, also where less was done |
| of ideal | ideal ms as a share of the measured time; above 100 % where ours is faster than torch's large product |
| error | the distance of a first update from the exact one, as a share of its norm |
| host ms / 100 matrices | the time that the host needs besides products |
| predicted ms | the time by the [model](predictions.md), without the host's |
| torch products predicted, ms | the time that the model predicts for the iteration with torch's products |
| peak MB | the peak of the memory that torch's allocator gives out during one step, above its value before the step |
| kernels | launches of kernels, on GPUs only; copies and fills count on fake GPUs, not on real ones |
| momentum_pack, descend | the passes before and after the iteration; *normalise* divides by the norm |
| gram, square, affine | products: X Xᵀ, of two square matrices, and Q X; *newton_schulz* is all of them in one call |
| rest | of our step: the host's work, mostly |
| of passes | bytes per element that passes over memory move; those of products are not included |
| ms predicted, of goal | the time of a step by the [model](predictions.md), and the goal for it |
| over the first | time divided by that of the first build, in the same round |
| parts, blocks | parts of matrices that a rank holds; pieces that an owner copies between messages and batches |
| messages | how many messages a rank sends in a step |
| plan, s | the seconds in which a rank decides who works on what, and the most that they may be |

In a column `case`, *beside busy cores* means that other processes keep every core busy. In a column `product`,
*kernel[grid]* means that Triton's launcher starts the kernel, not ours. In a column `way`, products are *torch*'s;
*symmetric*, by Triton; *compiled*, with CUTLASS; or *replayed* by CUDA graphs. Of the others, `muon-optimizer` is
Keller Jordan's.
"""

# What the files are about, by how their names begin.
QUESTIONS = {
    "step": "How long does a step take, beside other Muons?",
    "training-step": "How much of a whole training step is the optimizer's?",
    "character-model": "Which loss does a small model reach, beside AdamW?",
    "orthogonalize": "How long does the orthogonalization alone take?",
    "symmetric-gemm": "How fast is the symmetric product alone?",
    "bookkeeping": "How long do the passes before and after it take?",
    "portable": "How much slower is it without a compiled library?",
    "fake-step": "What will a step launch and move on a GPU?",
    "launch": "How long does the host of a GPU take to launch a kernel?",
    "model-host": "How long does the host of a GPU take for a step, launches included?",
    "host-time": "How long does the host take for a step of many matrices?",
    "scale": "How long does one rank among many take to plan and to step?",
    "plan": "How long does one rank among thousands take to plan?",
    "load": "How long does `get_kernel` take?",
    "build": "How long does a build take, and how large is it?",
}
# The question about the files of the lab, which measures all of it.
ON_ONE_GPU = "What was measured on one GPU?"
# What `explain()` writes behind our product on a CPU.
INSTRUCTIONS = re.compile(r"gemm_ \((\w+)\)")
# Cells in which there is nothing, or why.
NOTHING = ("", "unmeasured", "needs a GPU", "not installed")


def page(results: Path, beside: Path) -> str:
    """Return the page for the files in `results` that have timings, with links relative to the folder `beside`."""
    contents = {file: json.loads(file.read_text()) for file in sorted(results.glob("*.json"), reverse=True)}
    measured = {file: content for file, content in contents.items() if "lab" in content or "results" in content}
    answers = answered(measured)
    lines = [INTRODUCTION.format(results=link(results, beside)), index(answers, measured)]
    for question, files in answers.items():
        lines.append(f"## {question}\n")
        lines.extend("\n".join(section(file, measured[file], beside)) for file in files)
    return "\n".join(lines)


def answered(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the questions that files answer, in the order of `QUESTIONS`, each with its files in their order."""
    answers: dict[str, list[Path]] = {question: [] for question in (*QUESTIONS.values(), ON_ONE_GPU)}
    for file in files:
        kind = max((kind for kind in QUESTIONS if file.stem.startswith(f"{kind}-")), key=len, default="")
        answers[QUESTIONS.get(kind, ON_ONE_GPU)].append(file)
    return {question: answer for question, answer in answers.items() if answer}


def index(answers: Mapping[str, Sequence[Path]], contents: Mapping[Path, dict]) -> str:
    """Return a table of questions, with links to the sections of the files that answer them."""
    rows = [
        (question, "; ".join(f"[{file.stem}](#{file.stem}), {kind_of_machine(contents[file])}" for file in files))
        for question, files in answers.items()
    ]
    return markdown.table(("question", "answers"), rows) + "\n"


def kind_of_machine(content: dict) -> str:
    """Return the device of a file, and with which instructions our products ran there, as far as the file says."""
    instructions = dict.fromkeys(
        instruction for method in methods_of(content) for instruction in INSTRUCTIONS.findall(method)
    )
    return " with ".join(filter(None, (device_of(content), " and ".join(instructions))))


def methods_of(content: dict) -> list[str]:
    """Return the methods of ours that the rows of a file name, each once."""
    rows = [row for row in content.get("results", ()) if isinstance(row, dict)]
    return sorted({method for row in rows for method in row.get("methods") or [row.get("method")] if method})


def device_of(content: dict) -> str:
    facts = {**content, **content.get("lab", {})}
    return facts.get("device") or content.get("machine", {}).get("cpu", "an unnamed machine")


def section(file: Path, content: dict, beside: Path) -> Iterator[str]:
    """Yield the lines about one file: its machine, versions and commit, its tables and its figures."""
    yield f"### {file.stem}\n"
    methods = ", ".join(f"`{method}`" for method in methods_of(content))
    sentence = f" Ours by {methods}." if methods else ""
    yield f"{origin(content)}{sentence} [The file]({link(file, beside)}).\n"
    tables = list(lab_tables(content) if "lab" in content else sweep_tables(content, file.stem))
    for table in tables:
        shown, missing = without_nothing(table)
        if len(tables) > 1:
            yield f"#### {table.title}\n"
        yield f"{markdown.table(shown.headings, shown.rows)}\n"
        if missing:
            yield f"Not measured: {'; '.join(missing)}.\n"
    for figure in sorted(file.parent.glob(f"{file.stem}-*.png")):
        yield f"![{figure.stem}]({link(figure, beside)})\n"


def without_nothing(table: Table) -> tuple[Table, list[str]]:
    """Return a table without the rows and columns in which nothing was measured, and what these are called."""
    rows = [row for row in table.rows if has_content(row[1:])]
    if not rows:
        return table, []
    columns = [(heading, *cells) for heading, cells in zip(table.headings, zip(*rows))]
    shown = [column for column in columns if column == columns[0] or has_content(column[1:])]
    missing = [line for line in table.rows if line not in rows] + [line for line in columns if line not in shown]
    headings, *rows = zip(*shown)
    return table._replace(headings=headings, rows=rows), list(map(with_reason, missing))


def has_content(cells: Iterable[str]) -> bool:
    return any(cell not in NOTHING for cell in cells)


def with_reason(line: Sequence[str]) -> str:
    """Return what a row or column without content is called, and why nothing was measured, if it says so."""
    reasons = sorted(set(line[1:]) - {"", "unmeasured"})
    return f"{line[0]} ({', '.join(reasons)})" if reasons else line[0]


def origin(content: dict) -> str:
    """Return the machine, versions and commit with which a file was measured, as far as the file says."""
    facts = {**content, **content.get("lab", {})}
    package = content.get("versions", {}).get("optimizer", {})
    versions = {**{name: facts.get(name) for name in ("torch", "triton", "cuda")}, **content.get("versions", {})}
    named = [f"{name} {versions[name]}" for name in ("torch", "triton", "cuda") if versions.get(name)]
    threads = facts.get("threads") or content.get("machine", {}).get("threads")
    if threads and "lab" not in content:
        named.append(f"{threads} threads" if threads > 1 else "1 thread")
    if "work_dtype" in content:
        named.append(f"products in {content['work_dtype']}")
    commit = str(facts.get("commit") or package.get("commit") or package.get("source_commit") or "unknown")
    made_of = markdown.commit_words(commit, facts.get("dirty", package.get("dirty")))
    return f"{device_of(content)}, {', '.join(named)}; {made_of}."


def link(file: Path, beside: Path) -> str:
    return Path(os.path.relpath(file, beside)).as_posix()


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page(RESULTS, PAGE.parent)}, "Make docs/performance.md from the results."))
