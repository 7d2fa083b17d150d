"""Say why a tag is no release of what is committed; `.github/workflows/release.yml` asks before it builds.

python -m tools.release.tag 0.1
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import tomllib

from tools.release.changelog import sections

ROOT = Path(__file__).resolve().parents[2]


def read_version(root: Path) -> int:
    return tomllib.loads((root / "build.toml").read_text())["general"]["version"]


def faults(root: Path, tag: str) -> list[str]:
    """Return a line for each file that a release named `tag` would contradict; none if it may go out."""
    version = read_version(root)
    release = json.loads((root / "tests/golden/api.json").read_text())["release"]
    lines = []
    if tag.partition(".")[0] != str(version):
        lines.append(f"{tag} is not of version {version}, which is in build.toml")
    if tag not in sections((root / "CHANGELOG.md").read_text()):
        lines.append(f"CHANGELOG.md has no section [{tag}]")
    if tag != release:
        lines.append(f"the snapshot of the interface is of {release}: run `python -m tools.release.api --released`")
    if not (root / "flake.lock").is_file():
        lines.append("there is no flake.lock, so nobody could build the same again: run `nix flake lock`")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", help="such as 0.1")
    tag = parser.parse_args().tag
    lines = faults(ROOT, tag)
    print("\n".join(lines or [f"{tag} may be released"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
