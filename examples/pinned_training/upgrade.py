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
import tempfile
from pathlib import Path

import httpx2
from huggingface_hub import HfApi
from kernel import LOCK, PINS, PinError, download
from verify import VerificationError, pin_of, verify

# Of the Hub, the network and this disk, and for a name, a proxy or an address that the client cannot use.
CLIENT_ERRORS = (ValueError, OSError, ImportError, httpx2.HTTPError, httpx2.InvalidURL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="a commit on the Hub")
    revision = parser.parse_args().revision
    if revision and not re.fullmatch("[0-9a-f]{40}", revision):
        parser.error(f"a revision is a commit, 40 hexadecimal digits, not {revision!r}")
    try:
        upgrade(revision)
    except (VerificationError, PinError, *CLIENT_ERRORS) as error:
        print(f"upgrade.py: nothing is pinned: {error}")
        return 1
    return 0


def read_dependency() -> tuple[str, int]:
    """Return the repository and the version that kernels.lock asks for; PinError if it is no lock file."""
    try:
        (locked,) = json.loads(LOCK.read_text())
        return locked["dependency"]["repo-id"], locked["dependency"]["version"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise PinError(f"{LOCK.name} is damaged: {error!r}") from None


def upgrade(revision: str | None) -> None:
    """Pin a revision, by default the newest, and print the pins; VerificationError if files and digests disagree."""
    repo_id, version = read_dependency()
    revision = revision or HfApi().repo_info(repo_id, repo_type="kernel", revision=f"v{version}").sha
    variants = sorted(path for path in (download(repo_id, revision) / "build").iterdir() if path.is_dir())
    if not variants:
        raise VerificationError(f"{revision} of {repo_id} has no variants in build/")
    pins = {variant.name: pin_of(variant) for variant in variants}
    for variant in variants:
        verify(variant, pins)
        if (variant_version := json.loads((variant / "metadata.json").read_text()).get("version")) != version:
            raise VerificationError(f"{revision} is of version {variant_version}, and {LOCK.name} asks for {version}")
    lock = [{"dependency": {"repo-id": repo_id, "version": version}, "lock": {"commit": revision}}]
    write(lock, {"repo-id": repo_id, "revision": revision, "variants": pins})
    print(f"{LOCK.name} and {PINS.name} pin {repo_id} {revision}:")
    print(*(f"  {name}  {pin}" for name, pin in pins.items()), sep="\n")
    print("Compare these pins with the publisher's before you commit them.")


def write(lock: list, pins: dict) -> None:
    """Write both files; neither is touched before there is room for both."""
    with tempfile.TemporaryDirectory(prefix=".", dir=LOCK.parent) as staging:
        for file, content in ((LOCK, lock), (PINS, pins)):
            Path(staging, file.name).write_text(json.dumps(content, indent=2) + "\n")
        for file in (LOCK, PINS):
            Path(staging, file.name).replace(file)


if __name__ == "__main__":
    sys.exit(main())
