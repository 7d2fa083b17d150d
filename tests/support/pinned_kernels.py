"""Kernels in plain Python that pass verification, published to a Hub, and the pins of what was published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import HfApi

from tests.support.hub_clients import write_variant
from tools.pins.pins_file import KERNEL, Pins, write_pins
from tools.pins.verify import pin_of

# What an import needs is imported first: another user may be unable to read where Python and its packages are.
LOAD = """
import json, os, sys, sysconfig
from pathlib import Path
import kernels, torch
sysconfig.get_config_vars()
torch.library.custom_op("first::op", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")(torch.ones(1))
user, revision, lock, plain, *ways = sys.argv[1:]
if user != "0":
    os.setgid(int(user))
    os.setuid(int(user))
trust = {"trust_remote_code": True}
by = {
    "version": lambda: kernels.get_kernel("org/tiny", version=0, **trust),
    "revision": lambda: kernels.get_kernel("org/tiny", revision=revision, **trust),
    "locked": lambda: kernels.get_locked_kernel("org/tiny", lockfile=lock, **trust),
    "load": lambda: kernels.load_kernel("org/tiny", lockfile=lock),
    "plain": lambda: kernels.get_local_kernel(Path(plain)),
    "installed": lambda: kernels.get_local_kernel(
        kernels.install_kernel("org/tiny", revision=revision, local_files_only=True, **trust)
    ),
}
print(json.dumps([by[way]().scale(torch.ones(1)).item() for way in ways]))
"""
WAYS = "version", "revision", "locked", "load", "plain", "installed"


def write_tiny(folder: Path, factors: Mapping[str, int], version: int = 0) -> Path:
    """Write variants of the kernel `tiny` into `folder`/build: by name, the number by which each multiplies."""
    for name, factor in factors.items():
        backend = {"type": name.removeprefix("torch-")}
        write_variant(folder / "build" / name, f"{factor:07x}", factor, version=version, backend=backend)
    return folder / "build"


def publish(endpoint: str, repo_id: str, build: Path, branch: str = "v0") -> str:
    """Publish the variants in `build` as the only ones of a branch, and return the commit."""
    api = HfApi(endpoint=endpoint, token=False)
    api.create_repo(repo_id, exist_ok=True, **KERNEL)
    api.create_branch(repo_id, branch=branch, exist_ok=True, **KERNEL)
    done = api.upload_folder(
        folder_path=build, path_in_repo="build", repo_id=repo_id, revision=branch, delete_patterns="*", **KERNEL
    )
    return done.oid


def pins_of(build: Path) -> dict[str, str]:
    """Return the pin of each variant in `build`, by its name."""
    return {variant.name: pin_of(variant) for variant in sorted(build.iterdir()) if variant.is_dir()}


def write_lock(file: Path, repo_id: str, revision: str, version: int = 0) -> Path:
    """Write a lock file with one commit."""
    lock = {"dependency": {"repo-id": repo_id, "version": version}, "lock": {"commit": revision}}
    file.write_text(json.dumps([lock]))
    return file


def released(endpoint: str, folder: Path, factors: Mapping[str, int]) -> SimpleNamespace:
    """Publish `org/tiny` with these variants; return its build, revision, pins file and lock file, all in `folder`."""
    build = write_tiny(folder, factors)
    revision = publish(endpoint, "org/tiny", build)
    pins = folder / "tiny.pins.json"
    write_pins(pins, Pins("org/tiny", revision, pins_of(build)))
    lock = write_lock(folder / "kernels.lock", "org/tiny", revision)
    return SimpleNamespace(build=build, revision=revision, pins=pins, lock=lock)


def counting(application, requests: list[tuple[str, str]]):
    """Return `application` whose apps note the method and path of each request."""

    def counted(*arguments):
        app = application(*arguments)

        async def noting(scope, receive, send):
            requests.append((scope["method"], scope["path"]))
            await app(scope, receive, send)

        return noting

    return counted
