"""Loads the kernel that a sweep measures from its folder, without the Hub's package, and chooses the device."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import sys
from pathlib import Path
from types import ModuleType

import torch


def load_built(build: Path) -> tuple[ModuleType, torch.device]:
    """Return the kernel in `build` and the device to measure it on: the GPU if there is one and the build is for CUDA.

    Raises FileNotFoundError, with what was found, if there is no variant that this torch can load.
    """
    variant = find_variant(build)
    backend = read_metadata(variant)["backend"]["type"]
    kernel = load_variant(variant)
    return kernel, torch.device("cuda" if backend == "cuda" and torch.cuda.is_available() else "cpu")


def find_variant(build: Path) -> Path:
    """Return the variant in `build` for this processor and torch, as a folder: CUDA's for a CUDA torch, else the CPU's.

    As for the Hub's loader, a compiled one comes before one without a library.
    """
    folders = [file.parent for file in sorted(build.glob("*/metadata.json"))]
    folders.sort(key=is_compiled, reverse=True)
    backends = {folder: read_metadata(folder)["backend"]["type"] for folder in folders}
    wanted = ("cuda", "cpu") if torch.version.cuda else ("cpu",)
    for backend in wanted:
        for folder, of in backends.items():
            if of == backend and runs_here(folder):
                return folder
    variants = ", ".join(f"{folder.name} for {of}" for folder, of in backends.items()) or "no variant"
    raise FileNotFoundError(f"need a variant for {' or '.join(wanted)} in {build}, which has {variants}")


def is_compiled(variant: Path) -> bool:
    """Whether a variant has a library; a noarch one has Python files alone."""
    return any(variant.glob("*.so"))


def runs_here(variant: Path) -> bool:
    """Whether a variant has no library, or one for this machine's processor, which its folder's name has."""
    return not is_compiled(variant) or platform.machine() in variant.name


def load_variant(folder: Path) -> ModuleType:
    """Return the package in a variant's folder, imported once, under a name that no other folder's has."""
    name = f"variant_{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def read_metadata(folder: Path) -> dict:
    """Return the content of a variant's `metadata.json`."""
    return json.loads((folder / "metadata.json").read_text())
