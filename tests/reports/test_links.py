"""Each relative link of the pages leads to a file that is committed, and each anchor to a heading of that page."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z]+:")


def committed(root: Path) -> set[str]:
    """Return what users of a repository have: its files and their folders, relative to `root`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    files = {Path(name) for name in listed.stdout.split("\0") if name}
    return {str(path) for file in files for path in (file, *file.parents)}


def text(page: Path) -> str:
    """Return the prose of a page of Markdown, or of a notebook's cells of it."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them: of equal ones the second ends in -1."""
    counts: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text(page))):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        counts[anchor] = counts.get(anchor, 0) + 1
    return {f"{anchor}-{i}" if i else anchor for anchor, count in counts.items() for i in range(count)}


def broken(root: Path, page: str, files: set[str]) -> list[str]:
    """Return the relative links of a page that lead to no file of `files`, or to no heading."""
    prose = CODE.sub("", FENCE.sub("", text(root / page)))
    return [
        link
        for link in LINK.findall(prose)
        if not ELSEWHERE.match(link) and not leads_on(root, root / page, link, files)
    ]


def leads_on(root: Path, page: Path, link: str, files: set[str]) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(root) or str(target.relative_to(root)) not in files:
        return False
    return not anchor or (target.is_file() and anchor in anchors(target))


def test_every_relative_link_of_the_pages_leads_somewhere(repository):
    files = committed(repository)
    pages = sorted(name for name in files if name.endswith((".md", ".ipynb")))
    assert {"README.md", "CARD.md", "docs/faq.md", "docs/migration/torch.md"} < set(pages)
    assert {page: links for page in pages if (links := broken(repository, page, files))} == {}


def test_every_page_of_docs_is_linked_from_another(repository):
    """Otherwise no reader finds it."""
    files = committed(repository)
    pages = {name for name in files if name.endswith(".md")}
    linked = set()
    for page in pages:
        paths = [link.partition("#")[0] for link in LINK.findall(text(repository / page)) if not ELSEWHERE.match(link)]
        linked |= {((repository / page).parent / path).resolve() for path in paths if path}
    assert {page for page in pages if page.startswith("docs/") and repository / page not in linked} == set()


PAGE = """# A page

## What `opt.step()` does, and why

## Twice
## Twice

```
# no heading [no link](nowhere.md)
```

`[code](nowhere.md)` and [elsewhere](https://example.org/nowhere.md)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "not_committed.md").write_text("# Here")
    return tmp_path


@pytest.mark.parametrize(
    "link, leads",
    [
        ("page.md", True),
        ("#what-optstep-does-and-why", True),
        ("page.md#twice-1", True),
        ("page.md#twice-2", False),
        ("#no-heading", False),
        ("nowhere.md", False),
        ("not_committed.md", False),
        ("../page.md", False),
    ],
)
def test_a_link_that_leads_nowhere_is_found(folder, link, leads):
    (folder / "page.md").write_text(PAGE + f"\n[a link]({link})\n")
    assert broken(folder, "page.md", {"page.md"}) == ([] if leads else [link])
