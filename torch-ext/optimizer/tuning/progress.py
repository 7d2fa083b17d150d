"""The line of text that tells how far something long is."""

from __future__ import annotations

import shutil
import sys
from typing import Callable

Progress = Callable[[int, int, str], None]  # done, total, what


class Line:
    """Progress in one line, drawn in place on a terminal; elsewhere a line for each call."""

    def __init__(self, title: str):
        self._title = title
        self._drawn = 0  # characters that stand in the line

    def __call__(self, done: int, total: int, what: str) -> None:
        text = f"{self._title} {done}/{total}: {what}"
        if not sys.stdout.isatty():
            print(text, flush=True)
            return
        # One that wraps could not be drawn over.
        shown = text if done == total else text[: shutil.get_terminal_size().columns - 1]
        end = "\n" if done == total else ""
        print(f"\r{shown.ljust(self._drawn)}", end=end, flush=True)
        self._drawn = 0 if done == total else len(shown)
