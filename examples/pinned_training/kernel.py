"""Load the kernel that kernels.lock and optimizer.pins.json name, verified, on one process or on many."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import kernels
import torch.distributed as dist
from huggingface_hub import snapshot_download
from verify import pin_of, verify

PROJECT = Path(__file__).resolve().parent
LOCK, PINS = PROJECT / "kernels.lock", PROJECT / "optimizer.pins.json"


class PinError(Exception):
    """A reason not to load the kernel, meant for the person at the terminal."""


@dataclass(frozen=True)
class Pinned:
    """What this project has pinned: one commit of a repository, and the pins of its variants by their names."""

    repo_id: str
    revision: str
    variants: Mapping[str, str]


def read_pinned() -> Pinned:
    """Return what the two files of this project say; PinError if they disagree or pin nothing yet."""
    try:
        (locked,), pins = json.loads(LOCK.read_text()), json.loads(PINS.read_text())
        pinned = Pinned(pins["repo-id"], pins["revision"], dict(pins["variants"]))
        named = locked["dependency"]["repo-id"], locked["lock"]["commit"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise PinError(f"{LOCK.name} or {PINS.name} is damaged: {error!r}") from None
    if named != (pinned.repo_id, pinned.revision):
        raise PinError(
            f"{LOCK.name} and {PINS.name} name different revisions: take both from one commit of this project"
        )
    if not pinned.variants:
        raise PinError(f"{PINS.name} is a placeholder and pins nothing: run python upgrade.py")
    return pinned


def install(pinned: Pinned) -> Path:
    """Return the folder of this machine's variant; download all variants first, unless the cache has them."""
    # Pins are more than trust in the publisher, of which offline nothing is known.
    options = {"local_files_only": True, "trust_remote_code": [pinned.repo_id]}
    try:
        return kernels.install_kernel(pinned.repo_id, revision=pinned.revision, **options)
    except FileNotFoundError:
        download(pinned.repo_id, pinned.revision)
        return kernels.install_kernel(pinned.repo_id, revision=pinned.revision, **options)


def download(repo_id: str, revision: str) -> Path:
    """Download a whole revision, since only a whole one loads offline, and return its folder in the cache."""
    cache = os.environ.get("KERNELS_CACHE")  # where kernels looks, if it is set
    return Path(snapshot_download(repo_id, repo_type="kernel", revision=revision, cache_dir=cache))


def load_kernel() -> ModuleType:
    """Return the kernel, imported after every process has verified it and all have the same.

    Under torchrun call it after `init_process_group`: on each node one process downloads, the others wait. Raises
    PinError on every process if one of them has a reason not to load it.
    """
    node, downloads = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"

    def installed() -> tuple[str, Path] | None:
        if "LOCAL_KERNELS" in os.environ:
            raise PinError("LOCAL_KERNELS is set, which loads other code than what is pinned: unset it")
        return (node, install(read_pinned())) if downloads else None

    variants = dict(filter(None, on_every_process(installed)))

    def verified() -> tuple[str, str]:
        if node not in variants:
            raise PinError(f"no process of node {node} has LOCAL_RANK=0, which is the one that downloads")
        return verify(variants[node], read_pinned().variants).name, pin_of(variants[node])

    builds = on_every_process(verified)
    if len(set(builds)) > 1:
        raise PinError("\n".join(["processes have different builds:", *(f"  {i}: {b}" for i, b in enumerate(builds))]))
    return kernels.get_local_kernel(variants[node])


def on_every_process(work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returns on each process, once all have done it; if it fails on one, PinError on all."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # of whatever kind: the other processes would wait for this one
        failure = str(error) or type(error).__name__  # a MemoryError says nothing
    outcomes = [(result, failure)]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, failure))
    failures = dict.fromkeys(failure for _, failure in outcomes if failure is not None)  # many processes fail alike
    if failures:
        raise PinError("\n".join(failures))
    return [result for result, _ in outcomes]
