"""The groups of attacks: each makes its cases in a folder of its own, and says of each case what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.attacks.hard_conditions import CONDITIONS, loads_under
from tests.support.attacks.lie_trials import WITH_PIN, WITHOUT_PIN, Load, Trial, stage
from tests.support.attacks.tampered_builds import BUILDS
from tests.support.attacks.tampered_caches import DELETED
from tests.support.attacks.tampered_trials import tampered_caches
from tests.support.release_trees import COMPILED, write_tree
from tools.build.commands import BuildError
from tools.hub.release import read_release


class Attack(NamedTuple):
    """One case. `survived` is with the pin, `without` is the same user without one (None: no pin plays a part).

    Survived: no foreign code ran, and what was loaded or published, if anything, is what was built.
    """

    group: str
    name: str
    survived: bool
    without: bool | None
    message: str


def hub(folder: Path) -> Iterator[Attack]:
    """Faults and lies of a Hub, each met with an empty cache, and then the same cache with an honest Hub."""
    with stage(folder) as theatre:
        for guarded, bare in zip(theatre.trials(WITH_PIN), theatre.trials(WITHOUT_PIN)):
            yield Attack(guarded.group, guarded.name, guarded.safe, bare.safe, told(guarded))


def told(trial: Trial) -> str:
    return " | ".join(
        f"{load.end}{' and foreign code ran' if load.ran else ''}" for load in (trial.first, trial.second)
    )


def caches(folder: Path) -> Iterator[Attack]:
    """Caches in which somebody has changed something, loaded offline."""
    deleted = {name for name, today, tamper in DELETED}
    for name, seen in tampered_caches(folder).items():
        if "today" not in seen:
            continue  # untouched ones, for comparison
        ends = {"refused", "error", *(["loads"] if name in deleted else [])}
        with_pin, today = (not each["foreign"] and each["end"] in ends for each in (seen["with pin"], seen["today"]))
        yield Attack("tampered caches", name, with_pin, today, str(seen["with pin"]))


def builds(folder: Path) -> Iterator[Attack]:
    """Builds in which somebody has changed something, given to be published."""
    for number, (name, tamper) in enumerate(BUILDS):
        tree = write_tree(folder / str(number), variants=(COMPILED,))
        original = contents_of(tree)
        tamper(tree)
        try:
            survived, message = contents_of(tree) == original, "accepted"
        except (ValueError, BuildError) as error:
            survived, message = True, str(error)
        yield Attack("tampered builds", name, survived, None, message)


def contents_of(tree: Path) -> dict[str, bytes]:
    """Return what would be published of a tree, which raises what `read_release` raises."""
    return {path: file.read_bytes() for path, file in read_release(tree).files().items()}


def conditions(folder: Path) -> Iterator[Attack]:
    """Crowds, kills, full disks, odd names: here the load has to be the honest one, not merely a safe one."""
    with stage(folder) as theatre:
        for name in CONDITIONS:
            loads = loads_under(theatre, name)
            yield Attack("hard conditions", name, all(map(honest, loads)), None, ", ".join(load.end for load in loads))


def honest(load: Load) -> bool:
    return load.end == "honest" and not load.ran


GROUPS: tuple[Callable[[Path], Iterator[Attack]], ...] = (caches, builds, hub, conditions)
