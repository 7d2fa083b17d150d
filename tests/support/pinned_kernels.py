"""Kernels in plain Python that pass verification, published to a Hub, and the pins of what was published."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import huggingface_hub
import kernels
import torch
from huggingface_hub import HfApi

from tests.support.attacks.forked_clients import Clients
from tests.support.hub_clients import run_client, write_variant
from tools.build.variant_metadata import digest_of
from tools.pins.pins_file import KERNEL, Pins, write_pins
from tools.pins.verify import pin_of

ALONE = f"""
import json, sys
from {__name__} import factors
print(json.dumps(factors(*json.loads(sys.argv[1]))))
"""
# What calling a kernel's first operation imports: it takes as long as importing torch.
CALLED = "torch._dynamo"
WAYS = "version", "revision", "locked", "load", "plain", "installed"
# The variant without a library that this torch loads, and one that it does not.
HERE, ELSEWHERE = ("torch-cuda", "torch-cpu") if torch.version.cuda else ("torch-cpu", "torch-cuda")


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


def loaded(clients: Clients | None, variables: dict[str, str], *arguments: object) -> list[float]:
    """Return `factors` of a fork of `clients`; None stands for a process as a user starts it."""
    if clients:
        done = clients.call(variables, f"{__name__}:factors", *arguments)
    else:
        done = run_client(ALONE, [json.dumps(arguments)], variables)
    return done.get("factors", done)


def factors(user: int, revision: str, lock: str, plain: str, ways: list[str]) -> dict[str, object]:
    """Load `org/tiny` in each way, as this user, and return by what it multiplies, or the error. 0 is the present user.

    Call it in a process of its own, with the environment of a client.
    """
    # What an import needs is imported first: another user may be unable to read where Python and its packages are.
    sysconfig.get_config_vars()
    first = torch.library.custom_op("first::op", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
    first(torch.ones(1))
    assert huggingface_hub.snapshot_download  # which imports the module that has it
    sys.dont_write_bytecode = user == 0  # root, who runs tests in containers, may write where nobody else may
    if user != 0:
        os.setgid(user)
        os.setuid(user)
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
    try:
        return {"factors": [by[way]().scale(torch.ones(1)).item() for way in ways]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def counting(application, requests: list[tuple[str, str]]):
    """Return `application` whose apps note the method and path of each request."""

    def counted(*arguments):
        app = application(*arguments)

        async def noting(scope, receive, send):
            requests.append((scope["method"], scope["path"]))
            await app(scope, receive, send)

        return noting

    return counted


def commented(kernel: ModuleType, folder: Path, note: str) -> Path:
    """Return a folder with the tests' variant as another commit would have it: one more comment, and a digest of it."""
    variant = shutil.copytree(
        Path(kernel.__file__).parent, folder / "build" / Path(kernel.__file__).parent.name,
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    with (variant / "muon.py").open("a") as code:
        code.write(f"# {note}\n")
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["digest"]["files"] = dict(sorted(digest_of(variant).files.items()))
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return folder / "build"
