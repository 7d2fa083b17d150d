"""Bring an older commit of a branch back: what it held becomes a new commit at the branch's head.

    python -m tools.hub.rollback --to <40 hex digits> --pins optimizer.pins.json

The history stays, so what was rolled back can be published again, and whoever pinned a commit keeps it. A branch is
that of the version in the variants' metadata.json. Pins do not change with the commit. Give the file of pins that was
written when that commit was published: what the Hub has is compared with it before anything changes, and the file then
names the new commit. Without it only files and digests are compared, and the pins that are printed are the Hub's word.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import disable_progress_bars

from tools.build.commands import BuildError
from tools.build.variant_metadata import read_metadata
from tools.hub.branch import OF_THE_HUB, read_head
from tools.hub.release import configured_repo_id, find_variants
from tools.pins.pins_file import KERNEL, Pins, read_pins, write_pins
from tools.pins.verify import faults, pin_of

ROOT = Path(__file__).resolve().parents[2]
# The folder of the Hub's client in each folder that it fills.
OF_THE_CLIENT = ".cache/"


def roll_back(api: HfApi, repo_id: str, to: str, pins: Mapping[str, str] | None) -> tuple[str, dict[str, str]]:
    """Put the contents of the commit `to` at the head of its branch; return the new commit and the variants' pins.

    Raises ValueError, before anything changes, if `to` is no full commit or the head already, if its variants are of
    several versions, or if one would not be verified or is missing, by `pins` where given; the client's errors.
    """
    if not re.fullmatch("[0-9a-f]{40}", to):
        raise ValueError(f"{to!r} is no commit: 40 hexadecimal digits are needed")
    heads = {ref.target_commit: ref.name for ref in api.list_repo_refs(repo_id, **KERNEL).branches}
    if to in heads:
        raise ValueError(f"{to} is the head of {heads[to]} already")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(api.snapshot_download(repo_id, revision=to, local_dir=folder, **KERNEL))
        variants = find_variants(root / "build")
        found = [f"{variant.name}: {line}" for variant in variants for line in faults(variant, pins)]
        absent = sorted({*(pins or ())} - {variant.name for variant in variants})
        found += [f"{name} has a pin and is not there" for name in absent]
        versions = sorted({read_metadata(variant).version for variant in variants}) if not found else []
        if len(versions) > 1:
            found.append(f"its variants are of the versions {versions}")
        if found:
            raise ValueError("\n".join([f"{to} cannot come back:", *found]))
        commit = put_back(api, repo_id, f"v{versions[0]}", to, root)
        return commit, {variant.name: pin_of(variant) for variant in variants}


def put_back(api: HfApi, repo_id: str, branch: str, to: str, root: Path) -> str:
    """Commit the files of `to`, which are in the folder `root`, in place of all that the branch has."""
    head = read_head(api, repo_id, branch)
    if head.new:
        raise ValueError(f"{repo_id} has no branch {branch}")
    # What is on this disk, and not what the Hub lists: a path of that may point anywhere.
    there = {file.relative_to(root).as_posix(): file for file in sorted(root.rglob("*")) if file.is_file()}
    back = {path: file for path, file in there.items() if not path.startswith((OF_THE_CLIENT, OF_THE_HUB))}
    operations = [CommitOperationDelete(path) for path in sorted(set(head.paths) - {*back, OF_THE_HUB})]
    operations += [CommitOperationAdd(path, file) for path, file in back.items()]
    return api.create_commit(
        repo_id,
        operations,
        commit_message=f"Roll back to {to}",
        revision=branch,
        parent_commit=head.commit,
        **KERNEL,
    ).oid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, metavar="COMMIT", help="the commit on the Hub, 40 hexadecimal digits")
    parser.add_argument("--repo-id", default=configured_repo_id(ROOT), help="default: %(default)s")
    parser.add_argument("--endpoint", help="default: HF_ENDPOINT, else https://huggingface.co")
    parser.add_argument("--pins", type=Path, metavar="FILE", help="the pins of that commit's release")
    arguments = parser.parse_args()
    repo_id, file = arguments.repo_id, arguments.pins
    disable_progress_bars()
    try:
        known = read_pins(file, repo_id).variants if file else None
        commit, pins = roll_back(HfApi(endpoint=arguments.endpoint), repo_id, arguments.to, known)
        if file:
            write_pins(file, Pins(repo_id, commit, pins))
    except (BuildError, ValueError, OSError, httpx2.HTTPError) as error:
        print(f"tools.hub.rollback: {error}", file=sys.stderr)
        return 1
    print(f"{repo_id} is back at {arguments.to}", f"commit {commit}", sep="\n")
    print(*(f"  {name}, pin {pin}" for name, pin in pins.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
