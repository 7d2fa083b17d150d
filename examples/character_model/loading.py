"""Loading the kernel as its users do, and saying what was loaded."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import kernels


@dataclass(frozen=True)
class Origin:
    """Where a loaded kernel comes from: its `build_info()`, and the commit on the Hub if it was downloaded."""

    build: Any
    hub_commit: str | None

    def facts(self) -> dict[str, Any]:
        """Return what a results file says about it."""
        return {**asdict(self.build), "hub_commit": self.hub_commit}


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
    files = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
    changed = [name for name, digest in files.items() if file_digest(variant / name) != digest]
    if changed:
        raise RuntimeError(f"{variant} is not what was built: {', '.join(changed)}")
    snapshot = variant.parents[1]
    return Origin(kernel.build_info(), snapshot.name if snapshot.parent.name == "snapshots" else None)


def file_digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
