"""Pin another revision of the kernel: write kernels.lock and optimizer.pins.json anew.

    python upgrade.py                  the newest commit of the version in kernels.lock
    python upgrade.py <40 hex digits>

A pin is only as good as the download that it is taken from. Compare what this prints with what the publisher has
printed, and commit both files together; `git revert` of that commit is the way back.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from huggingface_hub import HfApi
from kernel import LOCK, PINS, download
from verify import faults, pin_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="a commit on the Hub")
    revision = parser.parse_args().revision
    (locked,) = json.loads(LOCK.read_text())
    repo_id, version = locked["dependency"]["repo-id"], locked["dependency"]["version"]
    if revision is None:
        revision = HfApi().repo_info(repo_id, repo_type="kernel", revision=f"v{version}").sha
    elif not re.fullmatch("[0-9a-f]{40}", revision):
        parser.error(f"a revision is a commit, 40 hexadecimal digits, not {revision!r}")
    variants = sorted((download(repo_id, revision) / "build").iterdir())
    found = [f"{variant.name}: {fault}" for variant in variants for fault in faults(variant)]
    versions = {json.loads((variant / "metadata.json").read_text())["version"] for variant in variants}
    if found or versions != {version}:
        found = found or [f"version {versions}, and kernels.lock asks for {version}"]
        print(f"upgrade.py: nothing is pinned, since {repo_id} {revision} has faults:", *found, sep="\n  ")
        return 1
    write(repo_id, version, revision, variants)
    return 0


def write(repo_id: str, version: int, revision: str, variants: list[Path]) -> None:
    """Write both files, and print what they pin."""
    pins = {variant.name: pin_of(variant) for variant in variants}
    lock = [{"dependency": {"repo-id": repo_id, "version": version}, "lock": {"commit": revision}}]
    LOCK.write_text(json.dumps(lock, indent=2) + "\n")
    PINS.write_text(json.dumps({"repo-id": repo_id, "revision": revision, "variants": pins}, indent=2) + "\n")
    print(f"{LOCK.name} and {PINS.name} pin {repo_id} {revision}:")
    for name, pin in pins.items():
        print(f"  {name}  {pin}")
    print("Compare these pins with the publisher's before you commit them.")


if __name__ == "__main__":
    sys.exit(main())
