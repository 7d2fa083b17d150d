"""Running other programs: what they print, or one error that says what went wrong."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


class BuildError(Exception):
    """A build that cannot go on; the message is meant for the person at the terminal."""


def git(root: Path, *arguments: str | Path, stdin: str | None = None) -> str:
    """Return what git prints in the repository `root`; raise `BuildError` as `run` does.

    Git's own variables are left out: a hook sets them to the repository that it runs for, whatever the folder is.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return run(["git", *arguments], cwd=root, stdin=stdin, environment=environment)


def run(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    stdin: str | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    """Return what `command` prints; raise `BuildError` with its own words if it fails or is not installed."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=cwd, input=stdin, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(f"{words[0]} is needed and not on the PATH") from None
    if done.returncode:
        printed = (done.stderr + done.stdout).strip()
        raise BuildError(f"{words[0]} failed with status {done.returncode}:\n{printed}")
    return done.stdout
