"""Publish the variants that tools.build.variants has made to a Hub of kernels, as the Hub's own builder does.

    HF_ENDPOINT=http://127.0.0.1:<port> python -m tools.hub.publish   to tools.hub.server
    python -m tools.hub.publish --repo-id org/optimizer --tag 1.0     to huggingface.co, logged in with `hf auth login`

The variants and benchmarks/benchmark*.py become one commit on the branch v<version> of build.toml. A new branch
contains nothing else. On an existing branch the given variants are replaced and all others stay. build/CARD.md becomes
README.md of main. huggingface.co creates kernel repositories only for owners to whom it has given access.

What to know about loading (kernels 0.17.2, huggingface_hub 2.4.0):

- version=1 follows the branch v1. A commit id never moves: pin it wherever a change must be a decision.
- If the owner is not a trusted publisher, each load needs trust_remote_code, and `kernels lock` refuses its kernels;
  write kernels.lock yourself: [{"dependency": {"repo-id": ..., "version": 1}, "lock": {"commit": ...}}].
- Offline, and with load_kernel, only a whole snapshot is found. Fetch it beforehand:
  snapshot_download(repo_id, repo_type="kernel", revision="v1").
- With HF_HUB_DISABLE_TELEMETRY, DISABLE_TELEMETRY or DO_NOT_TRACK set, every load fails, as if the publisher could not
  be verified. Do not set them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import tomllib
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from rich.console import Console

from tools.build.commands import BuildError
from tools.build.variant_metadata import read_metadata
from tools.build.verify import deviations, find_variants

ROOT = Path(__file__).resolve().parents[2]
KERNEL = {"repo_type": "kernel"}


@dataclass(frozen=True)
class Release:
    """What is published, and where; made by `read_release`, which checks it."""

    repo_id: str
    version: int
    card: Path
    variants: tuple[Path, ...]
    benchmarks: tuple[Path, ...]

    @property
    def branch(self) -> str:
        return f"v{self.version}"

    def files(self) -> dict[str, Path]:
        """Path on the branch of every file except the card."""
        files = {f"benchmarks/{file.name}": file for file in self.benchmarks}
        for variant in self.variants:
            for file in sorted(variant.rglob("*")):
                if file.is_file() and file.suffix != ".pyc":
                    files[f"build/{file.relative_to(variant.parent).as_posix()}"] = file
        return files

    @property
    def described(self) -> str:
        """How many variants, files and bytes there are."""
        files = self.files().values()
        size = sum(file.stat().st_size for file in files) / 2**20
        variants = "1 variant" if len(self.variants) == 1 else f"{len(self.variants)} variants"
        return f"{variants}, {len(files)} files, {size:.1f} MiB"

    def replaces(self, path: str) -> bool:
        """Whether a file that is already on the branch belongs to what this release replaces."""
        folders = tuple(f"build/{variant.name}/" for variant in self.variants)
        return path.startswith((*folders, "benchmarks/benchmark"))


@dataclass(frozen=True)
class Published:
    """The result of publishing; `commit` holds the variants and is on the branch."""

    repo_id: str
    version: int
    branch: str
    commit: str
    variants: tuple[str, ...]
    trusted: bool

    def load_lines(self) -> list[str]:
        """Python that loads what was published: by version and by commit."""
        trust = "" if self.trusted else f', trust_remote_code=["{self.repo_id}"]'
        revisions = [f"version={self.version}", f'revision="{self.commit}"']
        return [f'kernels.get_kernel("{self.repo_id}", {revision}{trust})' for revision in revisions]


def read_release(
    root: Path, build: Path | None = None, *, repo_id: str | None = None, allow_dirty: bool = False
) -> Release:
    """Return the release of all variants in `build` (None: root/build), after checking each of them.

    Raises ValueError with all that is wrong: a file that is not what metadata.json says, a version other than
    build.toml's, variants of different commits, a build of uncommitted changes (unless `allow_dirty`); BuildError if
    there is nothing to check.
    """
    build = build or root / "build"
    general = tomllib.loads((root / "build.toml").read_text())["general"]
    repo_id = repo_id or general.get("hub", {}).get("repo-id")
    if not repo_id:
        raise ValueError("build.toml has no [general.hub] repo-id: give one")
    if not (build / "CARD.md").is_file():
        raise ValueError(f"{build} has no CARD.md: run `python -m tools.build.variants` first")
    variants = tuple(find_variants(build))
    problems = [
        f"{variant.name}: {problem}"
        for variant in variants
        for problem in variant_problems(variant, general["version"], allow_dirty)
    ]
    commits = {variant.name: source_commit(variant) for variant in variants}
    if len(set(commits.values())) > 1:
        problems.append("variants of different commits, which would be one release: build all of them again")
        problems += [f"{name}: from commit {commit}" for name, commit in commits.items()]
    if problems:
        raise ValueError("\n".join([f"{build} cannot be published:", *problems]))
    benchmarks = tuple(sorted((root / "benchmarks").glob("benchmark*.py")))
    return Release(repo_id, general["version"], build / "CARD.md", variants, benchmarks)


def variant_problems(variant: Path, version: int, allow_dirty: bool) -> list[str]:
    metadata = read_metadata(variant)
    problems = deviations(variant, metadata)
    if metadata.version != version:
        problems.append(f"is of version {metadata.version}, and build.toml of {version}: build again")
    # Dirty builds of one commit have ops of the same name, so a process can load only one of them.
    dirty = metadata.id.endswith("_dirty") or (metadata.provenance and metadata.provenance.dirty)
    if dirty and not allow_dirty:
        problems.append("is built from uncommitted changes: commit and build again, or say --allow-dirty")
    return problems


def source_commit(variant: Path) -> str | None:
    """Return the commit that a variant says it was built from, None if it does not say."""
    provenance = read_metadata(variant).provenance
    return provenance.kernel.commit if provenance and provenance.kernel else None


def publish(
    release: Release,
    *,
    endpoint: str | None = None,
    tag: str | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> Published:
    """Upload a release: the variants, the tag, the card; `progress` is called before each with what comes.

    The endpoint is HF_ENDPOINT unless given, and the token is the client's. Raises ValueError if the tag exists, and
    the client's errors. After an error the branch has the whole commit or nothing of it. A commit by somebody else in
    the meantime is an error, too.
    """
    api = HfApi(endpoint=endpoint)
    progress(f"looking for {release.repo_id}")
    api.create_repo(release.repo_id, exist_ok=True, **KERNEL)
    progress(f"uploading {release.described}")
    commit = commit_variants(api, release, tag)
    if tag:
        progress(f"setting the tag {tag}")
        api.create_tag(release.repo_id, tag=tag, revision=commit.oid, **KERNEL)
    progress("describing it in the card")
    api.create_commit(
        release.repo_id,
        [CommitOperationAdd("README.md", release.card)],
        commit_message=f"Describe {release.branch}",
        **KERNEL,
    )
    names = tuple(variant.name for variant in release.variants)
    trusted = is_trusted(api, release.repo_id)
    return Published(release.repo_id, release.version, release.branch, commit.oid, names, trusted)


def commit_variants(api: HfApi, release: Release, tag: str | None):
    refs = api.list_repo_refs(release.repo_id, **KERNEL)
    if tag in {ref.name for ref in refs.tags}:
        raise ValueError(f"{release.repo_id} has a tag {tag}, and tags do not move: choose another")
    heads = {ref.name: ref.target_commit for ref in refs.branches}
    new = release.branch not in heads
    head = heads["main"] if new else heads[release.branch]
    if new:
        api.create_branch(release.repo_id, branch=release.branch, revision=head, **KERNEL)
    files = release.files()
    # .gitattributes belongs to the Hub: it says which files are large.
    stale = [
        path
        for path in api.list_repo_files(release.repo_id, revision=head, **KERNEL)
        if path not in files and path != ".gitattributes" and (new or release.replaces(path))
    ]
    operations = [CommitOperationDelete(path) for path in stale]
    operations += [CommitOperationAdd(path, file) for path, file in files.items()]
    return api.create_commit(
        release.repo_id,
        operations,
        commit_message=f"Publish {', '.join(variant.name for variant in release.variants)}",
        revision=release.branch,
        parent_commit=head,
        **KERNEL,
    )


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
    return "\n".join(
        [
            f"Published {published.repo_id}, branch {published.branch}",
            f"commit {published.commit}",
            *(f"  {name}" for name in published.variants),
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
    arguments = parser.parse_args()
    try:
        release = read_release(ROOT, arguments.build, repo_id=arguments.repo_id, allow_dirty=arguments.allow_dirty)
        with Console(stderr=True).status("") as status:
            published = publish(release, endpoint=arguments.endpoint, tag=arguments.tag, progress=status.update)
    except (BuildError, ValueError, OSError, httpx2.HTTPError) as error:
        print(f"tools.hub.publish: {error}", file=sys.stderr)
        return 1
    print(report(published))
    return 0


if __name__ == "__main__":
    sys.exit(main())
