"""What generated pages share: the newest file of results, and the command that writes pages or says if they are old."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def newest(folder: Path, kind: str, maker: str) -> Path:
    """Return the newest file `<kind>-<date>.json`; FileNotFoundError without one, which names the module that makes it.

    Names sort by their dates.
    """
    files = sorted(folder.glob(f"{kind}-*.json"))
    if not files:
        raise FileNotFoundError(f"need a file {kind}-*.json of `python -m {maker}` in {folder}")
    return files[-1]


def write_or_check(pages: Mapping[Path, str], description: str) -> int:
    """Write each page's content; with --check on the command line change nothing, and return 1 if one differs."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if something is not up to date")
    if parser.parse_args().check:
        return int(any(not page.exists() or page.read_text() != content for page, content in pages.items()))
    for page, content in pages.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(content)
    print(f"written: {', '.join(map(str, pages))}")
    return 0
