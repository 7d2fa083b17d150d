"""Loading the kernel as its users do, and saying what was loaded."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import kernels


@dataclass(frozen=True)
class Origin:
    """Where a loaded kernel comes from; `hub_commit` is None for one that was not downloaded."""

    variant: str
    ops: str
    digest: str
    source_commit: str
    dirty: bool
    hub_commit: str | None


def load_by_version_and_commit(repo_id: str, version: int) -> tuple[ModuleType, Origin, Origin]:
    """Return the kernel for CPUs and its origins: loaded by version, which may move, and by the commit that this named.

    Raises RuntimeError if the two differ.
    """
    # Asked for by name: a CUDA build of torch would not take the CPU variant by itself.
    options = {"backend": "cpu", "trust_remote_code": True}
    kernel = kernels.get_kernel(repo_id, version=version, **options)
    by_version = origin_of(kernel)
    pinned = kernels.get_kernel(repo_id, revision=by_version.hub_commit, **options)
    by_commit = origin_of(pinned)
    if by_commit != by_version:
        raise RuntimeError(f"version {version} and its commit are different kernels: {by_version} and {by_commit}")
    return kernel, by_version, by_commit


def origin_of(kernel: ModuleType) -> Origin:
    """Return the origin of a loaded kernel; RuntimeError if its files are not those that were built.

    Loading does not compare them with the digest in metadata.json, so this does.
    """
    variant = Path(kernel.__file__).parent
    metadata = json.loads((variant / "metadata.json").read_text())
    files = metadata["digest"]["files"]
    changed = [name for name, digest in files.items() if file_digest(variant / name) != digest]
    if changed:
        raise RuntimeError(f"{variant} is not what was built: {', '.join(changed)}")
    snapshot = variant.parents[1]
    source = metadata["provenance"]["kernel"]
    return Origin(
        variant=variant.name,
        ops=metadata["id"],
        digest=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        source_commit=source["commit"],
        dirty=source["dirty"],
        hub_commit=snapshot.name if snapshot.parent.name == "snapshots" else None,
    )


def file_digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
