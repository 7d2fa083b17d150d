"""Running other programs: what they print, or one error that says what went wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


class BuildError(Exception):
    """A build that cannot go on; the message is meant for the person at the terminal."""


def run(command: Sequence[str | Path], cwd: Path | None = None, stdin: str | None = None) -> str:
    """Return what `command` prints; raise `BuildError` with its own words if it fails or is not installed."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=cwd, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(f"{words[0]} is needed and not on the PATH") from None
    if done.returncode:
        said = (done.stderr + done.stdout).strip()
        raise BuildError(f"{words[0]} failed with status {done.returncode}:\n{said}")
    return done.stdout
