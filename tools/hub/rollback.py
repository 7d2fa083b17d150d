"""Bring the variants of an older commit of a branch back: they become a new commit at the branch's head.

    python -m tools.hub.rollback --to <40 hex digits> --pins optimizer.pins.json

The history stays, so what was rolled back can be published again, and whoever pinned a commit keeps it. A branch is
that of the version in the variants' metadata.json. Pins do not change with the commit. Give the file of pins that was
written when that commit was published: what the Hub has is compared with it before anything changes, and the file then
names the new commit. Without it only files and digests are compared, and the pins that are printed are the Hub's word.

Only what was compared comes back, and README.md, which nothing runs. A commit with other files is refused, for they
might run. Benchmarks are the exception, because every release has some: no pin covers them, so they stay away until
the next release.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import disable_progress_bars

from tools.build.commands import BuildError
from tools.build.variant_metadata import read_metadata
from tools.hub.branch import OF_THE_HUB, read_head
from tools.hub.release import configured_repo_id, find_variants
from tools.pins.pins_file import CLIENT_ERRORS, KERNEL, Pins, check_place, read_pins, write_pins
from tools.pins.verify import faults, pin_of

ROOT = Path(__file__).resolve().parents[2]
# The folder of the Hub's client in each folder that it fills.
OF_THE_CLIENT = ".cache/"
PAGE = "README.md"


def roll_back(api: HfApi, repo_id: str, to: str, pins: Mapping[str, str] | None) -> tuple[str, dict[str, str]]:
    """Put the variants of the commit `to` at the head of its branch; return the new commit and the variants' pins.

    Raises ValueError, before anything changes, if `to` is no full commit or the head already, if it has no variants or
    those of several versions, if one would not be verified or is missing, by `pins` where given, or if it has files of
    which nothing is compared; the client's errors.
    """
    if not re.fullmatch("[0-9a-f]{40}", to):
        raise ValueError(f"{to!r} is no commit: 40 hexadecimal digits are needed")
    heads = {ref.target_commit: ref.name for ref in api.list_repo_refs(repo_id, **KERNEL).branches}
    if to in heads:
        raise ValueError(f"{to} is the head of {heads[to]} already")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(api.snapshot_download(repo_id, revision=to, local_dir=folder, **KERNEL))
        variants = find_variants(root / "build")
        problems = [] if variants else ["it has no variant"]
        problems += [f"{variant.name}: {line}" for variant in variants for line in faults(variant, pins)]
        absent = sorted({*(pins or ())} - {variant.name for variant in variants})
        problems += [f"{name} has a pin and is not there" for name in absent]
        names, files = {variant.name for variant in variants}, files_in(root)
        strangers = sorted(path for path in files if not is_compared(path, names) and not is_left_out(path))
        problems += [f"{ascii(path)[1:-1]} is of no variant, and so nothing is compared with it" for path in strangers]
        versions = sorted({read_metadata(variant).version for variant in variants}) if not problems else []
        if len(versions) > 1:
            problems.append(f"its variants are of the versions {versions}")
        if problems:
            raise ValueError("\n".join([f"{to} cannot come back:", *problems]))
        back = {path: file for path, file in files.items() if is_compared(path, names)}
        commit = put_back(api, repo_id, f"v{versions[0]}", to, back)
        return commit, {variant.name: pin_of(variant) for variant in variants}


def files_in(root: Path) -> dict[str, Path]:
    """Return the files of a downloaded commit by their paths, without what is the Hub's or the client's.

    They are what is on this disk, and not what the Hub lists: a path of that may point anywhere.
    """
    there = {file.relative_to(root).as_posix(): file for file in sorted(root.rglob("*")) if file.is_file()}
    return {path: file for path, file in there.items() if path != OF_THE_HUB and not path.startswith(OF_THE_CLIENT)}


def is_compared(path: str, variants: Collection[str]) -> bool:
    """Whether a file is of one of the verified variants, or the page, which nothing runs."""
    folder, _, rest = path.partition("/")
    return path == PAGE or (folder == "build" and "/" in rest and rest.split("/")[0] in variants)


def is_left_out(path: str) -> bool:
    """Whether a file is a benchmark, as every release has it."""
    return path.startswith("benchmarks/benchmark") and path.endswith(".py") and path.count("/") == 1


def put_back(api: HfApi, repo_id: str, branch: str, to: str, back: Mapping[str, Path]) -> str:
    """Commit these files of `to`, by their paths, in place of all that the branch has."""
    head = read_head(api, repo_id, branch)
    if head.new:
        raise ValueError(f"{repo_id} has no branch {branch}")
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
        if file:
            check_place(file)
        known = read_pins(file, repo_id).variants if file else None
        commit, pins = roll_back(HfApi(endpoint=arguments.endpoint), repo_id, arguments.to, known)
        # Before the file, so that an error of the disk loses neither the commit nor the pins.
        print(f"{repo_id} has the variants of {arguments.to} again", f"commit {commit}", sep="\n")
        print(*(f"  {name}, pin {pin}" for name, pin in pins.items()), sep="\n")
        if file:
            write_pins(file, Pins(repo_id, commit, pins))
    except (BuildError, *CLIENT_ERRORS) as error:
        print(f"tools.hub.rollback: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
