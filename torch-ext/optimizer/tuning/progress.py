"""A line of text that shows the progress of something long."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from typing import Callable

Progress = Callable[[int, int, str], None]  # done, total, what


class Line:
    """Progress in one line, drawn in place on a terminal and in a notebook; elsewhere a line for each call."""

    def __init__(self, title: str):
        self._title = title
        self._drawn = 0  # characters in the line at present

    def __call__(self, done: int, total: int, what: str) -> None:
        # Whoever read the output may be gone, and other ranks wait for this one: work goes on.
        with suppress(OSError, ValueError):
            self._draw(done, total, f"{self._title} {done}/{total}: {what}")

    def _draw(self, done: int, total: int, text: str) -> None:
        if not _draws_in_place():
            print(text, flush=True)
            return
        # A line that wraps could not be drawn over.
        shown = text if done == total else text[: shutil.get_terminal_size().columns - 1]
        end = "\n" if done == total else ""
        print(f"\r{shown.ljust(self._drawn)}", end=end, flush=True)
        self._drawn = 0 if done == total else len(shown)


def _draws_in_place() -> bool:
    """Whether a carriage return takes what is printed back to the start of its line.

    Terminals and notebooks do. A notebook's kernel replaces the standard output by a stream that is not a terminal.
    """
    # Loggers that stand in for the standard output may lack `isatty`, and there may be no output at all.
    is_terminal = getattr(sys.stdout, "isatty", None)
    return bool(is_terminal and is_terminal()) or type(sys.stdout).__module__.startswith("ipykernel.")
