"""Tables and words for pages in docs/, and replacing the text between the markers <!-- name --> and <!-- end -->."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MARKED = re.compile(r"(<!-- (\w+(?:: \w+)?) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, made: Mapping[str, str]) -> str:
    """Return a page with the text between each pair of markers replaced by `made[name]`.

    Raises ValueError unless the page has the marker of each of these names once, and no other.
    """
    names = [name for _, name, _ in MARKED.findall(page)]
    if sorted(names) != sorted(made):
        raise ValueError(f"the page needs the markers {', '.join(made)}, once each, got {', '.join(names) or 'none'}")
    return MARKED.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n\n{match[3]}", page)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """Return a table; with `numbers` all columns except the first are aligned to the right."""
    ruler = ["---", *["---:" if numbers else "---"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in (headings, ruler, *rows))


def commit_words(commit: str, dirty: bool | None) -> str:
    """Return from which sources results are: the start of a commit, and whether files differed from it."""
    return f"commit `{commit[:12]}`{', with uncommitted changes' if dirty else ''}"
