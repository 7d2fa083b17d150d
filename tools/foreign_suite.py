"""Run timm's own tests of its Muon on ours. They are fetched from the package index by name, and not stored here.

    python -m tools.foreign_suite build
    python -m tools.foreign_suite            # timm's own Muon, to see which tests pass without ours

`build` is a folder of built variants. Our class is registered as timm's `muon`, so `create_optimizer_v2(...,
opt="muon")` makes it. The tests with `muon` in their names are run, also those of timm's variants, which stay timm's.
Tests that set `lr` only in the first group are changed to set it in all, since ours has one group for each branch
(`ADAPTED`). The registry is told that ours has no `betas`, because ours calls it `adamw_betas`. If torchvision is not
installed, its imports in the tests are replaced: none of them is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.built_kernel import find_variant, load_variant

SOURCE = "timm==1.0.31"
ADAPTED = {
    "opt.param_groups[0]['lr'] = 0.": "for group in opt.param_groups: group['lr'] = 0.",
    "lambda step: opt.param_groups[0].__setitem__('lr', lrs[step])": (
        "lambda step: [group.__setitem__('lr', lrs[step]) for group in opt.param_groups]"
    ),
}


class Nothing(type):
    """Placeholders for classes that are imported but not used."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of a package that is not installed; their attributes, at any depth, are classes."""

    def __init__(self, package: str):
        self._package = package

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = Nothing.__getattr__.__get__(Nothing(module.__name__, (), {}))


def fetch(folder: Path) -> Path:
    """Download timm's source distribution into `folder` and return the folder where it is unpacked."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm", SOURCE]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (archive,) = folder.glob("timm-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


def adapt_(tests: Path) -> None:
    """Make the replacements of `ADAPTED` in the file `tests`, each once; ValueError if a text is not there."""
    text = tests.read_text()
    for original, replacement in ADAPTED.items():
        if text.count(original) != 1:
            raise ValueError(
                f"{tests.name} of {SOURCE} must have {original!r} once, it has it {text.count(original)} times"
            )
        text = text.replace(original, replacement)
    tests.write_text(text)


def register(optimizer_class: type) -> None:
    """Make timm's registry return `optimizer_class` for `muon`; timm must be importable."""
    from timm.optim._optim_factory import default_registry

    info = default_registry.get_optimizer_info("muon")
    default_registry._optimizers["muon"] = dataclasses.replace(info, opt_class=optimizer_class, has_betas=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run timm's tests of its Muon on ours.")
    parser.add_argument("build", type=Path, nargs="?", help="built variants; without them timm's own class is tested")
    build = parser.parse_args(arguments).build
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(StandIn("torchvision"))
    with tempfile.TemporaryDirectory() as folder:
        source = fetch(Path(folder))
        sys.path.insert(0, str(source))
        if build is not None:
            register(load_variant(find_variant(build)).Muon)
        tests = source / "tests" / "test_optim.py"
        adapt_(tests)
        return pytest.main(["-q", "-k", "muon", "-p", "no:cacheprovider", f"--rootdir={source}", "-rf", str(tests)])


if __name__ == "__main__":
    sys.exit(main())
