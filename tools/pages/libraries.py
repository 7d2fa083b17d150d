"""Write docs/libraries.md: what works in which library, from the last run of tests/integrations, and how it is written.

python -m tools.pages.libraries [--check]

`make test-integrations` makes the results and this page. The lines of use are those between `# <use>` and `# </use>` in
each test file, which its tests run.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from tools.pages.generated import write_or_check
from tools.pages.markdown import table

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "integrations"
RESULTS = TESTS / "results.json"
PAGE = ROOT / "docs" / "libraries.md"
HEADINGS = ("library", "version", "result", "tests")
LISTED = 60  # letters of the cases of a test that a line has at most

INTRODUCTION = """\
# Libraries

Muon in the libraries that people train with. Each line is shown by tests with the real library, tiny models with random
weights and text that comes with Python: `make test-integrations` runs them, and makes this page of what they found.
Everywhere `optimizer` is what `get_kernel` returns:

```python
from kernels import get_kernel

optimizer = get_kernel("org/optimizer", version=0, trust_remote_code=True)
```
"""


class Test(NamedTuple):
    """What a test shows, in a sentence, and how each of its cases ended; none where it has not run.

    Cases go by what pytest calls them, and end as `passed`, `failed` or `skipped`. The one of a test without parameters
    is called "".
    """

    sentence: str
    outcomes: Mapping[str, str]

    def works(self) -> bool:
        return set(self.outcomes.values()) == {"passed"}

    def line(self) -> str:
        """Return the sentence with the cases, and before it what is not as it says."""
        if self.works():
            return f"- {self.sentence}{in_brackets(list(self.outcomes))}."
        failed = [case for case, outcome in self.outcomes.items() if outcome == "failed"]
        return f"- **fails**: {self.sentence}{in_brackets(failed)}." if failed else f"- **not run**: {self.sentence}."


def in_brackets(cases: Sequence[str]) -> str:
    """Return the cases of a test, or, where that would be long, how many they are."""
    listed = ", ".join(cases)
    listed = listed if len(listed) <= LISTED else f"{len(cases)} cases"
    return f" ({listed})" if listed else ""


class Library(NamedTuple):
    """What a test file and the results say of a library; `version` is None where it was not installed."""

    file: str
    name: str
    text: str  # after the first line of the file's docstring
    lines_of_use: str
    version: str | None
    tests: Sequence[Test]

    def result(self) -> str:
        failing = sum(not test.works() for test in self.tests)
        return "works" if not failing else f"{failing} of {len(self.tests)} tests do not pass"


def libraries(folder: Path, results: dict) -> Iterator[Library]:
    """Yield what is known of each library, by its file in `folder`."""
    for file in sorted(folder.glob("test_*.py")):
        source = file.read_text()
        tree = ast.parse(source)
        name, _, text = (ast.get_docstring(tree) or file.stem).partition("\n")
        functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
        tests = [Test(sentence(each), outcomes_of(results["tests"], file.name, each.name)) for each in functions]
        version = results["versions"].get(distribution(file))
        yield Library(file.name, name.rstrip("."), text.strip(), lines_of_use(source), version, tests)


def sentence(test: ast.FunctionDef) -> str:
    """Return the first line of a test's docstring, without its period. Raises ValueError if it has none."""
    text = ast.get_docstring(test)
    if not text:
        raise ValueError(f"{test.name} needs a docstring, whose first line the page shows")
    return text.splitlines()[0].removesuffix(".")


def distribution(file: Path) -> str:
    """Return the name of the package that a test file is about."""
    return file.stem.removeprefix("test_").replace("_", "-")


def outcomes_of(tests: Mapping[str, dict], file: str, name: str) -> dict[str, str]:
    """Return how each case of a test ended, in the order in which they ran."""
    outcomes = {}
    for test, verdict in tests.items():
        function, _, case = test.partition("[")
        if function == f"{file}::{name}":
            outcomes[case.removesuffix("]")] = verdict["outcome"]
    return outcomes


def lines_of_use(source: str) -> str:
    """Return the lines between the markers, as at the top of a file, where two empty lines end what is indented.

    Raises ValueError unless there are pairs of markers.
    """
    parts = re.findall(r"# <use>\n(.*?) *# </use>\n", source, re.DOTALL)
    if not parts or any(source.count(marker) != len(parts) for marker in ("# <use>\n", "# </use>\n")):
        raise ValueError("need pairs of the markers `# <use>` and `# </use>`")
    lines = dedent("".join(parts)).strip()
    return re.sub(r"(\n +.*)\n\n(?=\S)", r"\1\n\n\n", lines)


def page(folder: Path, results: dict) -> str:
    """Return the page about the libraries of `folder`."""
    entries = list(libraries(folder, results))
    parts = [INTRODUCTION, table(HEADINGS, list(map(row, entries))) + "\n", origin(results), *map(section, entries)]
    return "\n".join(parts)


def row(library: Library) -> tuple[str, ...]:
    anchor = "".join(c for c in library.name.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    file = f"[{library.file}](../tests/integrations/{library.file})"
    return f"[{library.name}](#{anchor})", library.version or "not installed", library.result(), file


def origin(results: dict) -> str:
    with_what = f"torch {results['torch']} and Python {results['python']}, on {results['processor']}"
    return f"Run on {results['date']} with {with_what}; the tests took {results['seconds']} seconds.\n"


def section(library: Library) -> str:
    text = f"{library.text}\n\n" if library.text else ""
    shown = "\n".join(test.line() for test in library.tests)
    return f"## {library.name}\n\n{text}```python\n{library.lines_of_use}\n```\n\n{shown}\n"


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page(TESTS, json.loads(RESULTS.read_text()))}, __doc__))
