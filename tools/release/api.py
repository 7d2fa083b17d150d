"""Write tests/golden/api.json: the public surface of the package, and how it differs from the last release.

    python -m tools.release.api               after `make build`, when the surface has changed
    python -m tools.release.api --released    in the commit of a release: from here on, changes count anew

A test compares the file with the code. It asks for an entry in CHANGELOG.md, under Unreleased, for each name that was
added, changed or removed; and, from version 1 on, for a new `version` in build.toml if a name was changed or removed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.built_kernel import find_variant, load_variant
from tools.release.changelog import UNRELEASED, named, sections
from tools.release.surface import surface
from tools.release.tag import read_version

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path("tests/golden/api.json")
UPDATE = "run `make build` and `python -m tools.release.api`"


@dataclass(frozen=True)
class Snapshot:
    """A surface, and how it differs from that of a release: None is the state of the first snapshot."""

    release: str | None
    version: int  # of that release
    added: list[str]
    changed: dict[str, str]  # to what they were
    removed: dict[str, str]  # to what they were
    surface: dict[str, str]

    def released(self) -> dict[str, str]:
        """Return the surface of the release."""
        kept = {name: line for name, line in self.surface.items() if name not in self.added}
        return {**kept, **self.changed, **self.removed}

    def broken(self) -> list[str]:
        """Return the names without which, or without whose former meaning, code for the release may fail.

        An argument that every call must now give is one of them.
        """
        before = self.released()
        needed = [name for name in self.added if "(" in name and name.partition("(")[0] in before]
        needed = [name for name in needed if not re.search(" = |variadic", self.surface[name])]
        return [*self.changed, *self.removed, *needed]

    def follow(self, now: Mapping[str, str]) -> Snapshot:
        """Return the snapshot of the surface `now`, with its differences from the same release."""
        before = self.released()
        return replace(
            self,
            added=sorted(now.keys() - before.keys()),
            changed={name: line for name, line in before.items() if name in now and now[name] != line},
            removed={name: line for name, line in before.items() if name not in now},
            surface=dict(now),
        )


def read(root: Path) -> Snapshot:
    return Snapshot(**json.loads((root / SNAPSHOT).read_text()))


def written(snapshot: Snapshot) -> str:
    return json.dumps(asdict(snapshot), indent=1) + "\n"


def differences(snapshot: Snapshot, now: Mapping[str, str]) -> list[str]:
    """Return how the surface `now` differs from the snapshot's, and what to do, as lines; none if it does not."""
    then = snapshot.surface
    lines = [f"added: {name}: {now[name]}" for name in sorted(now.keys() - then.keys())]
    lines += [f"removed: {name}: {then[name]}" for name in sorted(then.keys() - now.keys())]
    both = sorted(then.keys() & now.keys())
    lines += [f"changed: {name}: {then[name]} -> {now[name]}" for name in both if then[name] != now[name]]
    return [*lines, f"the public surface is not that of {SNAPSHOT}: {UPDATE}"] if lines else []


def untold(snapshot: Snapshot, changelog: str, version: int, section: str = UNRELEASED) -> list[str]:
    """Return what a section does not tell users about the differences from the last release, and where to say it."""
    parts = sections(changelog).get(section, {})
    changes = {"Added": snapshot.added, "Changed": snapshot.changed, "Removed": snapshot.removed}
    lines = [
        f"{name} was {part.lower()}: name it, as `{name}`, in CHANGELOG.md under {section}, {part}"
        for part, names in changes.items()
        for name in outermost(names)
        if name not in named(parts.get(part, ""))
    ]
    if snapshot.broken() and 0 < version <= snapshot.version:
        lines.append(
            f"code for version {snapshot.version} may fail, because of {', '.join(snapshot.broken())}: set version = "
            f"{snapshot.version + 1} in build.toml, which is a branch of its own on the Hub, or take the change back"
        )
    return lines


def outermost(names: Collection[str]) -> list[str]:
    """Return the names without the arguments and members of others among them, which need no entry of their own."""
    return [name for name in names if not any(name.startswith((f"{other}(", f"{other}.")) for other in names)]


def release(snapshot: Snapshot, changelog: str, version: int) -> Snapshot:
    """Return the snapshot of a release: the newest section of the changelog that has a number.

    Raises ValueError if there is none, if it is the last release, if something is still under Unreleased, or if the
    section lacks a name, because changes that nobody was told of would count no more.
    """
    parts = sections(changelog)
    newest = next((name for name in parts if name != UNRELEASED), None)
    if newest is None or newest == snapshot.release or parts.get(UNRELEASED):
        raise ValueError(
            f"CHANGELOG.md needs a section of this release, under an empty {UNRELEASED}: it has {', '.join(parts)}"
        )
    if lines := untold(snapshot, changelog, version, newest):
        raise ValueError("\n".join(lines))
    return replace(snapshot, release=newest, version=version, added=[], changed={}, removed={})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="a folder of variants; default: %(default)s")
    parser.add_argument("--released", action="store_true", help="take this surface as that of the newest release")
    arguments = parser.parse_args()
    changelog, version = (ROOT / "CHANGELOG.md").read_text(), read_version(ROOT)
    try:
        snapshot = read(ROOT).follow(surface(load_variant(find_variant(arguments.build))))
        snapshot = release(snapshot, changelog, version) if arguments.released else snapshot
        lines = untold(snapshot, changelog, version)
    except (FileNotFoundError, ValueError) as error:
        print(f"tools.release.api: {error}", file=sys.stderr)
        return 1
    (ROOT / SNAPSHOT).write_text(written(snapshot))
    print("\n".join([f"written: {SNAPSHOT}", *lines]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
