"""What is about to be published: variants that were built from this tree, checked as strictly as by their users."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomllib

from tools.build.card import fill_card
from tools.build.commands import BuildError
from tools.build.noarch_tree import commit_made_of
from tools.build.released import COMPILED, RELEASED
from tools.build.variant_metadata import commit_of, read_metadata
from tools.pins.verify import METADATA, SIGNATURE, VerificationError, backend_of, pin_of, verify

# The machine in the header of an ELF file: 2 bytes at 18.
MACHINES = {"x86_64": 62, "aarch64": 183}


@dataclass(frozen=True)
class Release:
    """What is published, and where; made by `read_release`, which checks it.

    `commit` is that of the sources, and `pins` has the pin of each variant by its name.
    """

    repo_id: str
    version: int
    commit: str | None
    card: Path
    variants: tuple[Path, ...]
    pins: Mapping[str, str]
    benchmarks: tuple[Path, ...]

    @property
    def branch(self) -> str:
        return f"v{self.version}"

    def files(self) -> dict[str, Path]:
        """Path on the branch of every file except the card: nothing that no digest names."""
        files = {f"benchmarks/{file.name}": file for file in self.benchmarks}
        for variant in self.variants:
            digest = json.loads((variant / METADATA).read_bytes())["digest"]["files"]
            signature = [SIGNATURE] if (variant / SIGNATURE).exists() else []
            files |= {f"build/{variant.name}/{name}": variant / name for name in (*digest, METADATA, *signature)}
        return dict(sorted(files.items()))

    @property
    def described(self) -> str:
        """How many variants, files and bytes there are."""
        files = self.files().values()
        size = sum(file.stat().st_size for file in files) / 2**20
        variants = "1 variant" if len(self.variants) == 1 else f"{len(self.variants)} variants"
        return f"{variants}, {len(files)} files, {size:.1f} MiB"


def read_release(
    root: Path, build: Path | None = None, *, repo_id: str | None = None, allow_dirty: bool = False
) -> Release:
    """Return the release of all variants in `build` (None: root/build), after checking each of them.

    Python's caches of bytecode in the variants are deleted, as `verify` does it. Raises ValueError with all that is
    wrong: whatever `verify` refuses, a variant that is none of `RELEASED`, names, a version or a card other than
    build.toml's, a library for another machine, variants of different commits, a build of uncommitted changes (unless
    `allow_dirty`); BuildError if there is nothing to check. The commit that `noarch_tree` makes of another one counts
    as that one, for variants without a library.
    """
    build = build or root / "build"
    tables = tomllib.loads((root / "build.toml").read_text())
    repo_id = repo_id or configured_repo_id(root)
    if not repo_id:
        raise ValueError("build.toml has no [general.hub] repo-id: give one")
    variants = tuple(find_variants(build))
    if not variants:
        raise BuildError(f"{build} holds no variant: run `python -m tools.build.variants` first")
    pins = {variant.name: pin_of(variant) for variant in variants if (variant / METADATA).is_file()}
    problems = [f"{variant.name}: {line}" for variant in variants for line in verification_faults(variant, pins)]
    if not problems:
        problems = [
            *(f"{variant.name}: {line}" for variant in variants for line in tree_faults(variant, tables, allow_dirty)),
            *commit_faults(root, variants),
            *card_faults(root, build, tables["general"], repo_id),
        ]
    if problems:
        raise ValueError("\n".join([f"{build} cannot be published:", *problems]))
    benchmarks = tuple(sorted((root / "benchmarks").glob("benchmark*.py")))
    commit = commit_of(read_metadata(leading(variants)))
    return Release(repo_id, tables["general"]["version"], commit, build / "CARD.md", variants, pins, benchmarks)


def configured_repo_id(root: Path) -> str | None:
    """Return the repository that build.toml names."""
    return tomllib.loads((root / "build.toml").read_text())["general"].get("hub", {}).get("repo-id")


def find_variants(build: Path) -> list[Path]:
    """Return the folders in `build` that are variants by their name or their content."""
    folders = sorted(path for path in build.glob("*") if path.is_dir())
    return [path for path in folders if backend_of(path.name) or (path / METADATA).exists()]


def verification_faults(variant: Path, pins: Mapping[str, str]) -> list[str]:
    """Return what a user's `verify` would refuse, with the pins that this release would have."""
    try:
        verify(variant, pins)
    except VerificationError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


def tree_faults(variant: Path, tables: dict, allow_dirty: bool) -> Iterator[str]:
    """Where a variant is not what build.toml asks for, or metadata.json, which no digest covers, is not of its code."""
    general, metadata = tables["general"], read_metadata(variant)
    if variant.name not in RELEASED:
        yield f"is not among the variants of a release, {', '.join(RELEASED)}: docs/platforms.md promises others"
    if metadata.version != general["version"]:
        yield f"is of version {metadata.version}, and build.toml of {general['version']}: build again"
    if metadata.name.python_name != general["name"].replace("-", "_"):
        yield f"is named {metadata.name}, and build.toml's kernel {general['name']}"
    abi = tables.get("torch", {}).get("stable-abi", {}).get(backend_of(variant.name))
    if variant.name.startswith("torch-stable-abi") and abi:
        wanted = f"torch-stable-abi{abi.replace('.', '')}-"
        if not variant.name.startswith(wanted):
            yield f"is for another torch than build.toml's {wanted}"
    unique_id = re.sub("_dirty$", "", metadata.id).rpartition("_")[2]
    if unique_id not in (variant / "_ops.py").read_text():
        yield f"has the id {metadata.id}, and _ops.py another"
    yield from library_faults(variant, metadata.id)
    # Dirty builds of one commit have ops of the same name: in one process the second runs the first one's.
    dirty = metadata.id.endswith("_dirty") or (metadata.provenance and metadata.provenance.dirty)
    if dirty and not allow_dirty:
        yield "is built from uncommitted changes: commit and build again, or say --allow-dirty"


def library_faults(variant: Path, ops: str) -> Iterator[str]:
    """Where a library for Linux is for another machine than its folder, or initializes another module."""
    *_, machine, system = variant.name.split("-")
    for library in variant.glob("*.so") if system == "linux" else ():
        content = library.read_bytes()
        if content[18:20] != MACHINES.get(machine, 0).to_bytes(2, "little"):
            yield f"is for {machine}, and {library.name} for another machine"
        if f"PyInit_{ops}".encode() not in content:
            yield f"{library.name} is no module {ops}"


def is_compiled(variant: Path) -> bool:
    return variant.name in COMPILED


def leading(variants: tuple[Path, ...]) -> Path:
    """Return the variant whose commit is the release's: a compiled one if there is any."""
    return next(filter(is_compiled, variants), variants[0])


def commit_faults(root: Path, variants: tuple[Path, ...]) -> Iterator[str]:
    """Where variants are not of one commit; those without a library may be of what `noarch_tree` makes of it."""
    commits = {variant: commit_of(read_metadata(variant)) for variant in variants}
    first = leading(variants)
    others = {variant: commit for variant, commit in commits.items() if commit != commits[first]}
    if not others:
        return
    reason = "which would be one release: build all of them again"
    if commits[first] and is_compiled(first) and not any(map(is_compiled, others)):
        try:
            if set(others.values()) == {commit_made_of(root, commits[first])}:
                return
        except BuildError as error:
            reason = f"and it cannot be told whether they have the same sources: {error}"
    yield f"variants of different commits, {reason}"
    yield from (f"{variant.name}: from commit {commit}" for variant, commit in commits.items())


def card_faults(root: Path, build: Path, general: dict, repo_id: str) -> Iterator[str]:
    """Where CARD.md is not the tree's, filled in; `repo_id` stands in a card whose build.toml names no repository."""
    page, package = build / "CARD.md", Path("torch-ext", general["name"].replace("-", "_"))
    tables = {"general": {**general, "hub": {"repo-id": repo_id, **general.get("hub", {})}}}
    if not page.is_file():
        yield "no CARD.md: run `python -m tools.build.variants` first"
    elif page.read_text().strip() != fill_card(root, tables, package).strip():
        yield "CARD.md is not what the tree's gives: build again"
