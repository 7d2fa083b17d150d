"""Conditions under which a kernel is downloaded and loaded where nobody lies: crowds, kills, small disks, odd names."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.attacks.hub_faults import hang
from tests.support.attacks.lie_trials import WITH_PIN, Load, Stage
from tests.support.attacks.lying_hub import Lie, LyingHub

UNDER = f"{WITH_PIN}_under"
# In seconds: many loads at once share two cores.
PATIENCE = 120.0
# Names that a shell, a URL, a list of paths or a terminal takes for something else.
ODD_NAMES = (
    "with space",
    "Größe ü 核",
    "quote'\"quote",
    "new\nline",
    "co:lon",
    "semi;colon",
    "%41%2e%2e",
    "-x",
    "a=b",
    "l" * 200,
)
# What is done in a folder of its own; all loads that it returns have to be honest, but for those whose end it expects.
Condition = Callable[[Stage, Path], list[Load]]


def at_once(count: int) -> Condition:
    """Return the condition of so many clients that share one empty cache."""

    def load(stage: Stage, folder: Path) -> list[Load]:
        calls = [stage.started(WITH_PIN, folder, stage.endpoint) for _ in range(count)]
        return [stage.ended(call, folder, PATIENCE) for call in calls]

    return load


def killed(stage: Stage, folder: Path) -> list[Load]:
    """Kill a client by SIGKILL while it waits for a file of the variant, then load from what it has left."""
    with LyingHub(stage.endpoint, Lie("silence", "", {"get": hang})) as hub:
        call = stage.started(WITH_PIN, folder, hub.endpoint)
        deadline = time.monotonic() + PATIENCE
        while not any(asked.startswith("GET /kernels/") for asked in hub.asked):
            assert time.monotonic() < deadline, "the client asks for no file"
            time.sleep(0.01)
        call.kill()
        died = stage.ended(call, folder)
    assert died.end == "died", died
    return [under()(stage, folder)[0]]


def under(**conditions: int) -> Condition:
    """Return the condition of one load; see `with_pin_under` for what it takes."""
    named = {name.replace("_", " "): value for name, value in conditions.items()}

    def load(stage: Stage, folder: Path) -> list[Load]:
        return [stage.ended(stage.started(UNDER, folder, stage.endpoint, "commit", named), folder, PATIENCE)]

    return load


def full_disk(stage: Stage, folder: Path) -> list[Load]:
    """Let no file have more than 100 bytes, which has to be an error, and load again with room."""
    (failed,) = under(file_size=100)(stage, folder)
    assert failed.end == "error" and failed.said, failed
    return under()(stage, folder)


def read_only(stage: Stage, folder: Path) -> list[Load]:
    """Load from a filled cache in which the user may not write."""
    loads = under()(stage, folder)
    home = folder / "home"
    for path in [*home.rglob("*"), home]:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        return loads + under(no_privileges=1)(stage, folder)
    finally:
        for path in [home, *home.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def named(name: str) -> Condition:
    """Return the condition of a cache in a folder of that name."""

    def load(stage: Stage, folder: Path) -> list[Load]:
        inside = folder / name
        (inside / "home").mkdir(parents=True)
        return under()(stage, inside)

    return load


CONDITIONS: dict[str, Condition] = {
    "8 loads at once": at_once(8),
    "24 loads at once": at_once(24),
    "killed in mid-download, then loaded": killed,
    "a full disk, then room": full_disk,
    "a read-only cache": read_only,
    "umask 077": under(umask=0o077),
    **{f"a cache in {name[:20]!r}": named(name) for name in ODD_NAMES},
}


def loads_under(stage: Stage, name: str) -> list[Load]:
    """Return the loads of a condition, made in a new folder."""
    folder = stage.folder / "conditions" / str(list(CONDITIONS).index(name))
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "home").mkdir(parents=True)
    return CONDITIONS[name](stage, folder)
