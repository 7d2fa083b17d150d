"""`metadata.json`: what a variant is, where it comes from, and the digest of its files."""

from __future__ import annotations

import json
from pathlib import Path

import kernels
from kernels._rust import Digest, DigestAlgorithm, Metadata

from tools.build.commands import BuildError
from tools.build.recipe import Recipe
from tools.build.source_tree import Revision

# This is not a release of kernel-builder: the part after "+" distinguishes these builds from the Hub's.
BUILDER_VERSION = f"{kernels.__version__}+tools.build"


def write_metadata(variant: Path, recipe: Recipe, ops: str, revision: Revision) -> None:
    """Write `metadata.json` for the files in the folder `variant` and read it back with the Hub's parser."""
    backend = {"type": recipe.backend}
    if recipe.archs:
        backend["archs"] = list(recipe.archs)
    metadata = {
        "name": recipe.name,
        "id": ops,
        "version": recipe.version,
        "license": recipe.license,
        **recipe.links,
        "python-depends": list(recipe.python_depends),
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": dict(sorted(digest_of(variant).files.items()))},
        "provenance": {
            "kernel-builder": {"version": BUILDER_VERSION},
            "kernel": {"commit": revision.commit, "dirty": revision.dirty},
        },
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    if read_metadata(variant).id != ops:
        raise BuildError(f"{variant / 'metadata.json'} does not read back as {ops}")


def read_metadata(variant: Path) -> Metadata:
    """Return the parsed `metadata.json` of a variant; `BuildError`, in one line, if there is none or a broken one."""
    try:
        return Metadata.from_bytes((variant / "metadata.json").read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"{variant.name}/metadata.json: {' '.join(str(error).split())}") from None


def commit_of(metadata: Metadata) -> str | None:
    """Return the commit that a variant says it was built from, None if it does not say."""
    provenance = metadata.provenance
    return provenance.kernel.commit if provenance and provenance.kernel else None


def digest_of(variant: Path) -> Digest:
    """Return the digest of all files of a variant except its metadata."""
    return Digest.hash_variant(DigestAlgorithm.SHA256, variant)
