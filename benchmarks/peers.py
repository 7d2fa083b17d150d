"""Other implementations, if they are installed: `pip install --no-deps --target DIR -r requirements/benchmark.txt`.

Two are on no package index and must be copied: put flash-muon's folder `flash_muon` and dion's folder `dion`
into DIR. For a machine without a network copy DIR, or wheels to install into it (`pip download`, then `pip install
--no-index --find-links WHEELS --target DIR`).

Neither the package nor its tests need any of them. A missing one is marked in the results and does not stop a sweep.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from benchmarks.lost_gpu import blaming, wait_for_gpu
from benchmarks.result_file import NOT_INSTALLED
from tests.support.proofs import race

MODULES = {
    "timm": "timm.optim.muon",
    "pytorch-optimizer": "pytorch_optimizer",
    "muon-optimizer": "muon",
    "gram-newton-schulz": "gram_newton_schulz",
    "flash-muon": "flash_muon.muon",
    "dion": "dion.newton_schulz_triton",
}
# Packages whose own files import modules that a peer does not need and that are often missing. timm imports
# torchvision, whose wheels fit few builds of torch, and all models; the others import the rest of their optimizers.
SKIPPED = {"timm": ("timm", "timm.optim"), "flash-muon": ("flash_muon",), "dion": ("dion",)}

# What ours is called among the contestants; behind it, after a comma, is how it is launched.
OURS = "optimizer"

Made = TypeVar("Made")


class MissingError(Exception):
    """A contestant that cannot take part; the message is its mark in the results."""


def add_folder(folder: Path | None) -> None:
    """Make the packages in `folder` importable, after installed ones. ValueError if it is not a folder."""
    if folder is None:
        return
    if not folder.is_dir():
        raise ValueError(f"--peers needs a folder, got {folder}")
    sys.path.append(str(folder.resolve()))


def load_peer(name: str, module: str | None = None) -> ModuleType:
    """Return a module of the package called `name`, by default the one in MODULES.

    `MissingError` if the package is not installed or the module cannot be imported.
    """
    module = module or MODULES[name]
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise MissingError(NOT_INSTALLED)
    try:
        _skip_package_files(*SKIPPED.get(name, ()))
        return importlib.import_module(module)
    except Exception as error:
        raise MissingError(f"cannot be imported: {error}") from error


def admit(
    names: Iterable[str], make: Callable[[str], Made], lost: Mapping[str, str]
) -> tuple[dict[str, Made], dict[str, str]]:
    """Return what `make` returns for each contestant, and a mark for each one for which it fails.

    If it fails for OURS, the error is raised. Others may fail in any way, for example out of memory: the rest is
    still compared. Only if one makes the GPU unusable, which would make the rest fail, LostGpuError is raised. Those
    that have `lost` it in an earlier run are not tried again: they have these marks.
    """
    made, marks = {}, {}
    for name in names:
        if name in lost:
            marks[name] = lost[name]
            continue
        try:
            with blaming(name):
                contestant = make(name)
                wait_for_gpu()
            made[name] = contestant
        except MissingError as missing:
            marks[name] = str(missing)
        except race.LostGpuError:
            raise
        except Exception as error:
            if name == OURS:
                raise
            marks[name] = f"failed: {type(error).__name__}: {str(error)[:200]}"
    return made, marks


def is_ours(name: str) -> bool:
    """Whether a contestant is this package, in whatever way it is launched."""
    return name.partition(",")[0] == OURS


def versions() -> dict[str, str]:
    """Return the version of each peer, or a note that it was copied or is not installed."""
    peer_versions = {}
    for name in (*MODULES, "quack-kernels"):
        try:
            peer_versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            package = MODULES.get(name, "quack").partition(".")[0]
            peer_versions[name] = NOT_INSTALLED if importlib.util.find_spec(package) is None else "copied"
    return peer_versions


def _skip_package_files(*packages: str) -> None:
    for package in packages:
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            module = ModuleType(package)
            module.__path__ = list(spec.submodule_search_locations)
            module.__spec__ = spec
            sys.modules[package] = module
