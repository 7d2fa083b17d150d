"""Write docs/migration: for each optimizer that people come from, what to write here, line by line.

The lines are those that tests/wrappers/test_migration.py walks.

python -m tools.pages.migration [--check]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.migrations import ORIGINS
from tests.support.migrations.table import Line, Origin, call_here, call_there
from tools.pages import markdown
from tools.pages.generated import write_or_check

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "migration"
HEADINGS = ("there", "here, for matrices", "here, for the rest", "what changes in the numbers")

INDEX = """\
# Coming from another Muon

Each page shows the other package's call and the call here that takes the same steps, then a line for every argument.
Where a page says that nothing changes, both took the same steps in a test. In float64, three steps from the same
parameters with the same gradients end at points that differ by less than 3e-11 of the distance moved; the column
*tested against* names the code that took the other steps. As published, most packages iterate in bfloat16: a first
step differs from the exact one by up to 5 % of its length, and so does ours.

From `torch.optim.AdamW`, [learning_rates.md](learning_rates.md#coming-from-another-optimizer) says what to write, and
`import_state(opt, saved, "adamw")` takes its checkpoint along.

| from | tested against |
| --- | --- |
{rows}

On all pages `matrices` and `rest` are lists of `(name, parameter)`, and the groups here spell out the defaults there.
Such groups have two rates. A scheduler that takes rates, such as OneCycleLR, needs a list of two; one that multiplies
them does not. Without groups, `optimizer.Muon(model.named_parameters(), lr=..., adamw_lr=...)` makes both halves by
itself, from shapes and names, and `print(opt.explain())` shows them. Both halves have one `lr`, which one schedule
sets. AdamW's half moves at a fixed ratio of it.

## Take a checkpoint along

```python
opt = optimizer.Muon(...)  # as on the page
notes = optimizer.import_state(opt, saved, "timm")
```

`saved` is the state dict of the optimizer there. Momentum, AdamW's state and the settings of groups are taken over, and
`notes` are sentences about what was not. The [FAQ](faq.md#how-do-i-load-a-checkpoint-of-another-optimizer) says how to
continue a schedule. For a file without names give `import_state` the argument `names`, the names of the parameters in
the file's order.

`python -m examples.convert_checkpoint --help` says how to convert a file without a training script, from the names and
shapes of the parameters alone; it runs in a clone after `make build`.

`python -m tools.pages.migration` makes these pages from `tests/support/migrations`; every line is a test of
`tests/wrappers/test_migration.py`.
"""

PAGE = """\
# {origin.title}

{origin.introduction}

There:

```python
{there}```

Here:

```python
{here}```

`matrices` and `rest` are lists of `(name, parameter)`. Both calls take the same steps: in float64, three of them end at
points that differ by less than 3e-11 of the distance moved{condition}. [Tested against](#tested-against) names
the code on the other side.

## Line by line

Each line is an argument there, and what to write for it in the groups here, instead of what the call above has.

{table}
{differences}{checkpoint}
## Tested against

{tested}
"""

# Where an eps counts differently, the test makes the gradients of the rest large.
CONDITION = """ if the gradients of the rest
are far larger than AdamW's eps (the last of the [other differences](#other-differences))"""

CHECKPOINT = """
## Take a checkpoint along

```python
{origin.checkpoint}
```

The file's settings replace those above, rates included. The
[FAQ](../faq.md#how-do-i-load-a-checkpoint-of-another-optimizer) says how to continue a schedule.
"""
NO_CHECKPOINT = """
## Take a checkpoint along

Its files are not understood by `import_state`. Begin with a new state: momentum forgets how it began within a few
times 1 / (1 - momentum) steps.
"""


def pages() -> dict[Path, str]:
    """Return every page, by its path."""
    made = {FOLDER / f"{origin.name}.md": page(origin) for origin in ORIGINS.values()}
    rows = (
        f"| [{origin.title[5:]}](migration/{origin.name}.md) | {_line(origin.tested)} |" for origin in ORIGINS.values()
    )
    return {FOLDER.with_suffix(".md"): INDEX.format(rows="\n".join(rows)), **made}


def page(origin: Origin) -> str:
    """Return the page of one origin."""
    differences = f"\n## Other differences\n\n{origin.differences}\n" if origin.differences else ""
    return PAGE.format(
        origin=origin,
        condition="" if origin.scale_of_rest == 1 else CONDITION,
        there=_formatted(call_there(origin, tried=False)),
        here=_formatted(call_here(origin)),
        table=markdown.table(HEADINGS, [cells(line) for line in origin.lines]),
        differences=differences,
        checkpoint=CHECKPOINT.format(origin=origin) if origin.checkpoint else NO_CHECKPOINT,
        tested=f"{origin.tested[0].upper()}{origin.tested[1:]}.",
    )


def cells(line: Line) -> tuple[str, ...]:
    """Return a line of the table."""
    arguments = f"{_code(line.arguments)} (AdamW)" if line.part == "rest" else _code(line.arguments)
    return arguments, _code(line.muon), _code(line.rest), line.changes


def _formatted(code: str) -> str:
    """Return Python as the project's formatter writes it, which also looks into pages."""
    command = [sys.executable, "-m", "ruff", "format", "-"]
    return subprocess.run(command, input=code, cwd=FOLDER, check=True, capture_output=True, text=True).stdout


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    made = pages()
    status = write_or_check(made, __doc__)
    beside = [path for path in FOLDER.glob("*.md") if path not in made]
    return status or int("--check" in sys.argv and bool(beside))


if __name__ == "__main__":
    sys.exit(main())
