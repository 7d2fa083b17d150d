"""Publish the variants that tools.build.variants has made to a Hub of kernels, as the Hub's own builder does.

    HF_ENDPOINT=http://127.0.0.1:<port> python -m tools.hub.publish   to tools.hub.server
    python -m tools.hub.publish --repo-id org/optimizer --tag 1.0     to huggingface.co, logged in with `hf auth login`

The variants and benchmarks/benchmark*.py become one commit on the branch v<version> of build.toml. A new branch
contains nothing else. Of an existing branch the release replaces its own variants. Those that it lacks are another
commit's: each has to be named, with --drop to take it off the branch or with --keep to leave it there. build/CARD.md
becomes README.md of main. huggingface.co creates kernel repositories only for owners to whom it has given access.

The pin of each variant is printed, and written with --pins FILE: users verify with it (docs/verification.md). A kept
variant keeps the pin that FILE has of it, and publishing stops if the branch has something else by that name.
`python -m tools.hub.rollback` brings an older commit's variants back.

What to know about loading (kernels 0.17.2, huggingface_hub 2.4.0):

- version=0 follows the branch v0. A commit id never moves: pin it wherever a change must be a decision.
- If the owner is not a trusted publisher, each load needs trust_remote_code, and `kernels lock` refuses its kernels;
  write kernels.lock yourself: [{"dependency": {"repo-id": ..., "version": 0}, "lock": {"commit": ...}}].
- Offline, and with load_kernel, what get_kernel has downloaded is not found: fetch it with `python -m
  tools.pins.prefetch` (docs/pinning.md).
- With HF_HUB_DISABLE_TELEMETRY, DISABLE_TELEMETRY or DO_NOT_TRACK set, every load fails, as if the publisher could not
  be verified. Do not set them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from rich.console import Console

from tools.build.commands import BuildError
from tools.hub.branch import Head, read_head, settle_rest, stale
from tools.hub.release import Release, read_release
from tools.pins.pins_file import CLIENT_ERRORS, KERNEL, Pins, check_place, read_pins, write_pins

ROOT = Path(__file__).resolve().parents[2]
NONE = MappingProxyType({})


@dataclass(frozen=True)
class Published:
    """The result of publishing; `commit` is on the branch and holds the variants, which are given with their pins.

    `kept` are other commits' variants that stayed there, with the pins that were known of them.
    """

    repo_id: str
    version: int
    branch: str
    commit: str
    variants: Mapping[str, str]
    kept: Mapping[str, str | None]
    trusted: bool

    @property
    def pins(self) -> dict[str, str]:
        """The pins of all variants that have one, by name."""
        return {**{name: pin for name, pin in self.kept.items() if pin}, **self.variants}

    def load_lines(self) -> list[str]:
        """Python that loads what was published: by version and by commit."""
        trust = "" if self.trusted else f', trust_remote_code=["{self.repo_id}"]'
        revisions = [f"version={self.version}", f'revision="{self.commit}"']
        return [f'kernels.get_kernel("{self.repo_id}", {revision}{trust})' for revision in revisions]


def publish(
    release: Release,
    *,
    endpoint: str | None = None,
    tag: str | None = None,
    drop: Collection[str] = (),
    keep: Mapping[str, str | None] = NONE,
    progress: Callable[[str], object] = lambda what: None,
) -> Published:
    """Upload a release: the variants, the card, the tag; `progress` is called before each with what comes.

    `drop` and `keep` name the variants of the branch that the release lacks; `keep` has their pins, None where unknown.
    The endpoint is HF_ENDPOINT unless given, and the token is the client's. Raises ValueError if the tag exists or
    is a branch's name, or such a variant has not been named, and the client's errors. After an error the branch has the
    whole commit or nothing of it, and no tag, which could not be given again. A commit by somebody else in the meantime
    is an error, too.
    """
    api = HfApi(endpoint=endpoint)
    progress(f"looking for {release.repo_id}")
    api.create_repo(release.repo_id, exist_ok=True, **KERNEL)
    check_tag(api, release, tag)
    head = read_head(api, release.repo_id, release.branch)
    kept = settle_rest(api, release, head, drop, keep)
    progress(f"uploading {release.described}")
    commit = commit_variants(api, release, head, head.variants & set(drop))
    progress("describing it in the card")
    api.create_commit(
        release.repo_id,
        [CommitOperationAdd("README.md", release.card)],
        commit_message=f"Describe {release.branch}",
        **KERNEL,
    )
    if tag:  # last, so that a release that broke off can be published again with it
        progress(f"setting the tag {tag}")
        api.create_tag(release.repo_id, tag=tag, revision=commit, **KERNEL)
    trusted = is_trusted(api, release.repo_id)
    return Published(release.repo_id, release.version, release.branch, commit, release.pins, kept, trusted)


def check_tag(api: HfApi, release: Release, tag: str | None) -> None:
    refs = api.list_repo_refs(release.repo_id, **KERNEL)
    if tag in {ref.name for ref in refs.tags}:
        raise ValueError(f"{release.repo_id} has a tag {tag}, and tags do not move: choose another")
    if tag in {release.branch, *(ref.name for ref in refs.branches)}:
        raise ValueError(f"{tag} is a branch of {release.repo_id}, which a tag of that name would hide: choose another")


def commit_variants(api: HfApi, release: Release, head: Head, drop: Collection[str]) -> str:
    """Put the release onto its branch and return the commit."""
    if head.new:
        api.create_branch(release.repo_id, branch=release.branch, revision=head.commit, exist_ok=True, **KERNEL)
    files, names = release.files(), [variant.name for variant in release.variants]
    operations = [CommitOperationDelete(path) for path in stale(head, files, [*names, *drop])]
    operations += [CommitOperationAdd(path, file) for path, file in files.items()]
    return api.create_commit(
        release.repo_id,
        operations,
        commit_message=f"Publish {', '.join(names)}",
        revision=release.branch,
        parent_commit=head.commit,
        **KERNEL,
    ).oid


def is_trusted(api: HfApi, repo_id: str) -> bool:
    """Whether `get_kernel` loads the owner's kernels without trust_remote_code, by the rule that it uses.

    False if the Hub does not answer. What was published stays published in any case, and consent that is not needed
    does no harm.
    """
    try:
        owner = api.get_organization_overview(repo_id.split("/")[0])
    except (httpx2.HTTPError, OSError):
        return False
    return getattr(owner, "trustedKernelPublisher", False)


def report(published: Published) -> str:
    kept = {
        name: f"stays, pin {pin}" if pin else "stays, of which no pin is known" for name, pin in published.kept.items()
    }
    return "\n".join(
        [
            f"Published {published.repo_id}, branch {published.branch}",
            f"commit {published.commit}",
            *(f"  {name}, pin {pin}" for name, pin in published.variants.items()),
            *(f"  {name} {what}" for name, what in kept.items()),
            "Load it with",
            *(f"  {line}" for line in published.load_lines()),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="default: %(default)s")
    parser.add_argument("--repo-id", help="default: [general.hub] repo-id of build.toml")
    parser.add_argument("--endpoint", help="default: HF_ENDPOINT, else https://huggingface.co")
    parser.add_argument("--tag", help="a name for the commit that no other commit has")
    parser.add_argument("--allow-dirty", action="store_true", help="publish a build of uncommitted changes, too")
    parser.add_argument("--drop", action="append", default=[], metavar="VARIANT", help="take it off the branch")
    parser.add_argument("--keep", action="append", default=[], metavar="VARIANT", help="leave it on the branch")
    parser.add_argument("--pins", type=Path, metavar="FILE", help="write the pins to this file")
    arguments = parser.parse_args()
    try:
        published = publish_build(arguments)
        # Before the file, so that an error of the disk loses neither the commit nor the pins.
        print(report(published))
        if arguments.pins:
            write_pins(arguments.pins, Pins(published.repo_id, published.commit, published.pins))
    except (BuildError, *CLIENT_ERRORS) as error:
        print(f"tools.hub.publish: {error}", file=sys.stderr)
        return 1
    return 0


def publish_build(arguments: argparse.Namespace) -> Published:
    """Publish what the command line asks for, if the pins can be written then."""
    file = arguments.pins
    if file:
        check_place(file)
    release = read_release(ROOT, arguments.build, repo_id=arguments.repo_id, allow_dirty=arguments.allow_dirty)
    known = read_pins(file, release.repo_id).variants if file and file.exists() else {}
    with Console(stderr=True).status("") as status:
        return publish(
            release,
            endpoint=arguments.endpoint,
            tag=arguments.tag,
            drop=arguments.drop,
            keep={name: known.get(name) for name in arguments.keep},
            progress=status.update,
        )


if __name__ == "__main__":
    sys.exit(main())
