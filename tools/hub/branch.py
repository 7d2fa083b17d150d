"""What is on a branch of a Hub's repository, and what a release does with the variants there that it does not have."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from kernels._rust import Metadata

from tools.build.variant_metadata import commit_of
from tools.hub.release import Release
from tools.pins.pins_file import KERNEL
from tools.pins.verify import METADATA

# It says which files are large, and belongs to the Hub.
OF_THE_HUB = ".gitattributes"


@dataclass(frozen=True)
class Head:
    """The head of a branch: its commit and its files; `new` if the branch is still to be made, from this commit."""

    branch: str
    commit: str
    paths: tuple[str, ...]
    new: bool = False

    @property
    def variants(self) -> set[str]:
        """Names of the folders in build/; those of a branch to be made do not get onto it."""
        return (
            set() if self.new else {path.split("/")[1] for path in self.paths if path.count("/") > 1 and in_build(path)}
        )


def in_build(path: str) -> bool:
    return path.startswith("build/")


def read_head(api: HfApi, repo_id: str, branch: str) -> Head:
    """Return the head of a branch, or that of main, from which a new branch starts.

    A branch that is where main is was made by a release that broke off, and counts as new.
    """
    heads = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id, **KERNEL).branches}
    commit = heads.get(branch, heads["main"])
    paths = api.list_repo_files(repo_id, revision=commit, **KERNEL)
    return Head(branch, commit, tuple(paths), new=commit == heads["main"])


def settle_rest(
    api: HfApi, release: Release, head: Head, drop: Collection[str], keep: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Return the variants that stay on the branch and are not of the release, with the pins that `keep` knows of them.

    Raises ValueError if one of them is in neither `drop` nor `keep`, because a user of the branch would get another
    commit's code on another machine; if a name is in both, in the release, or kept and not on the branch; if a variant
    is not what its pin says. What is dropped may be gone, as after a release that broke off behind its commit; a wrong
    name leaves the right one unsettled.
    """
    release_variants = {variant.name for variant in release.variants}
    rest = head.variants - release_variants
    unsettled = sorted(rest - {*drop, *keep})
    wrong = [f"{name} is both dropped and kept" for name in sorted(set(drop) & set(keep))]
    gone = set(drop) - rest  # as after a release that broke off; what is unsettled may be a wrong name
    absent = (set(keep) - rest) | (gone if unsettled else gone & release_variants)
    wrong += [f"{name} is not on {head.branch}, or in this release" for name in sorted(absent)]
    if unsettled:
        wrong += [f"{head.branch} has variants that this release, of commit {release.commit}, lacks: --drop or --keep"]
    for name in sorted(rest - set(drop)):
        commit, pin = origin(api, release.repo_id, head.commit, name)
        wrong += [f"  {name}, of commit {commit}"] if name in unsettled else []
        if keep.get(name) not in (None, pin):
            wrong.append(f"{name} on {head.branch} has the sha256 {pin} of {METADATA}, and its pin is {keep[name]}")
    if wrong:
        raise ValueError("\n".join([f"{release.repo_id} cannot take this release:", *wrong]))
    return {name: keep[name] for name in sorted(rest - set(drop))}


def origin(api: HfApi, repo_id: str, revision: str, variant: str) -> tuple[str | None, str | None]:
    """Return which commit a published variant says that it was built from, and the sha256 of its metadata.json."""
    try:
        path = api.hf_hub_download(repo_id, f"build/{variant}/{METADATA}", revision=revision, **KERNEL)
    except EntryNotFoundError:
        return None, None
    content = Path(path).read_bytes()
    try:
        commit = commit_of(Metadata.from_bytes(content))
    except ValueError:
        commit = None
    return commit, hashlib.sha256(content).hexdigest()


def stale(head: Head, files: Iterable[str], replaced: Collection[str]) -> list[str]:
    """Return the paths to delete: all others than `files` from a new branch, else those of the `replaced` variants."""
    folders = (*(f"build/{variant}/" for variant in replaced), "benchmarks/benchmark")
    gone = set(head.paths) - set(files) - {OF_THE_HUB}
    return sorted(path for path in gone if head.new or path.startswith(folders))
