"""The way of a kernel to its user, by the command lines of tools/: build, verify, publish to a Hub on this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tools.hub.client_environment import client_environment

ROOT = Path(__file__).resolve().parents[2]


class CommandError(Exception):
    """A command that ended with an error, which it has printed itself."""


def call(console: Console, *command: str | Path, environment: dict[str, str] | None = None) -> None:
    """Print a Python command and run it in the repository; raise `CommandError` unless it succeeds."""
    words = [str(word) for word in command]
    console.print(f"[bold]$ python {shlex.join(words)}", highlight=False, soft_wrap=True)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise CommandError(f"python {shlex.join(words)} ended with status {done.returncode}")


def with_published_kernel(console: Console, *command: str | Path) -> int:
    """Run a Python command as a user of a Hub that has the working tree's kernel; return 1 if anything failed, else 0.

    It is a process of its own: the Hub's clients read their environment on import.
    """
    try:
        with tempfile.TemporaryDirectory() as folder, published_kernel(console, Path(folder)) as environment:
            call(console, *command, environment=environment)
    except CommandError as failure:
        console.print(f"[bold red]Failed:[/] {failure}", highlight=False, soft_wrap=True)
        return 1
    return 0


@contextmanager
def published_kernel(console: Console, folder: Path) -> Iterator[dict[str, str]]:
    """Build and publish the working tree's variant for CPUs; give the environment of a user of that Hub.

    The Hub runs while the block does. All is written below `folder`: the variant, the Hub, the cache of its clients.
    """
    build = folder / "build"
    call(console, "-m", "tools.build.variants", "--backend", "cpu", "--output", build)
    call(console, "-m", "tools.pins.verify", build)
    with running_hub(folder / "hub") as endpoint:
        environment = client_environment(endpoint, folder / "home")
        # A demonstration of work in progress, too: what is dirty is marked so wherever it is shown.
        call(console, "-m", "tools.hub.publish", "--build", build, "--allow-dirty", environment=environment)
        yield environment


@contextmanager
def running_hub(folder: Path) -> Iterator[str]:
    """Run tools.hub.server and give its endpoint."""
    command = [sys.executable, "-m", "tools.hub.server", "--folder", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as hub:
        try:
            announcement = hub.stdout.readline().strip()
            if not announcement.startswith("export HF_ENDPOINT="):
                raise CommandError("tools.hub.server did not start")
            yield announcement.partition("=")[2]
        finally:
            hub.terminate()
