"""Builds that are not what was built, for `tools.hub.release`: named changes of a tree with the variant `COMPILED`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.support.hub_clients import digest_again
from tests.support.release_trees import COMPILED, library


def described(**changes: object) -> Callable[[Path], None]:
    """Change keys of metadata.json; None removes one."""

    def tamper(tree: Path) -> None:
        file = tree / "build" / COMPILED / "metadata.json"
        metadata = {**json.loads(file.read_text()), **{key.replace("_", "-"): value for key, value in changes.items()}}
        file.write_text(json.dumps({key: value for key, value in metadata.items() if value is not None}))

    return tamper


def renamed(name: str) -> Callable[[Path], None]:
    return lambda tree: (tree / "build" / COMPILED).rename(tree / "build" / name) and None


def copied(name: str) -> Callable[[Path], None]:
    return lambda tree: shutil.copytree(tree / "build" / COMPILED, tree / "build" / name) and None


def written(name: str, content: bytes) -> Callable[[Path], None]:
    """Write a file of the variant."""

    def tamper(tree: Path) -> None:
        file = tree / "build" / COMPILED / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)

    return tamper


def linked(name: str, target: str) -> Callable[[Path], None]:
    """Replace a file of the variant by a link."""

    def tamper(tree: Path) -> None:
        link = tree / "build" / COMPILED / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    return tamper


def linked_variant(tree: Path) -> None:
    variant = tree / "build" / COMPILED
    variant.symlink_to(variant.rename(tree / "elsewhere"))


def other_card(tree: Path) -> None:
    with (tree / "build/CARD.md").open("a") as card:
        card.write("pip install something-else\n")


def other_module(tree: Path) -> None:
    """A library of another module under the right name, with its digest."""
    variant = tree / "build" / COMPILED
    next(variant.glob("*.so")).write_bytes(library("_other_cpu_0000002"))
    digest_again(variant)


BUILDS: list[tuple[str, Callable[[Path], None]]] = [
    ("another id", described(id="_tiny_cpu_fffffff")),
    ("another backend", described(backend={"type": "cuda"})),
    ("another name", described(name="torch")),
    ("another version", described(version=7)),
    ("a Python dependency", described(python_depends=["einops"])),
    ("a kernel dependency", described(kernel_depends=[{"repo-id": "org/other", "version": 1}])),
    ("no digest", described(digest=None)),
    ("a renamed variant, preferred by every torch", renamed("torch-stable-abi299-cpu-x86_64-linux")),
    ("a renamed variant, for another machine", renamed("torch-stable-abi211-cpu-aarch64-linux")),
    ("a renamed variant, for CUDA", renamed("torch-stable-abi211-cu130-x86_64-linux")),
    ("a variant under a name that no loader knows", renamed("torch-stable")),
    ("a copy for every platform", copied("torch-universal")),
    ("a copy without a machine", copied("torch-cpu")),
    ("an edited file", written("_ops.py", b"ops = None\n")),
    ("an added module", written("more.py", b"")),
    ("a library in __pycache__", written("__pycache__/more.abi3.so", b"\x7fELF")),
    ("bytecode in __pycache__", written("__pycache__/__init__.cpython-311.pyc", b"")),
    ("bytecode beside the source", written("more.pyc", b"")),
    ("a file that is a link", linked("_ops.py", "/etc/hostname")),
    ("an added link", linked("more", "/etc")),
    ("a variant that is a link", linked_variant),
    ("a library of another module", other_module),
    ("another card", other_card),
]
