"""The command of a generated page: it writes the page, or says whether the page is up to date."""

from __future__ import annotations

import argparse
from pathlib import Path


def write_or_check(page: Path, content: str, description: str) -> int:
    """Write `content` to `page`; with --check on the command line change nothing, and return 1 if they differ."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if the page is not up to date")
    if parser.parse_args().check:
        return int(not page.exists() or page.read_text() != content)
    page.write_text(content)
    print(f"written: {page}")
    return 0
