"""Trees that are ready to be published: build.toml, a card, a benchmark, and small variants in build/."""

from __future__ import annotations

from pathlib import Path

from tests.support.hub_clients import write_variant
from tools.pins.verify import backend_of

COMPILED = "torch-stable-abi211-cpu-x86_64-linux"
BUILD_TOML = """\
[general]
name = "tiny"
version = {version}
license = "Apache-2.0"

[general.hub]
repo-id = "org/tiny"

[torch.stable-abi]
cpu = "2.11"
"""


def write_tree(root: Path, version: int = 1, variants: tuple[str, ...] = ("torch-cpu",), factor: int = 2) -> Path:
    """Write a tree whose variants multiply by `factor`; what is compiled is a library only by its first bytes."""
    for folder in ("benchmarks", "build", "torch-ext/tiny"):
        (root / folder).mkdir(parents=True)
    (root / "build.toml").write_text(BUILD_TOML.format(version=version))
    (root / "CARD.md").write_text("# tiny {{ version }}\n")
    (root / "torch-ext/tiny/__init__.py").touch()
    (root / "benchmarks/benchmark.py").write_text("# for the Hub\n")
    (root / "benchmarks/sweep.py").write_text("# for us\n")
    for variant in variants:
        add_variant(root / "build" / variant, factor, version=version)
    (root / "build/CARD.md").write_text(f"# tiny {version}\n")
    return root


def add_variant(variant: Path, factor: int, **metadata: object) -> Path:
    """Write one variant, with a library if it is named as a compiled one, and return it."""
    backend = backend_of(variant.name)
    variant.mkdir(parents=True, exist_ok=True)
    if variant.name.endswith("-linux"):
        ops = f"_tiny_{backend}_{factor:07d}"
        (variant / f"{ops}.abi3.so").write_bytes(library(ops))
    return write_variant(variant, f"{factor:07d}", factor, backend={"type": backend}, **metadata)


def library(ops: str) -> bytes:
    """What a library for x86-64 has of what is looked at: ELF's magic, the machine, the name of the module's start."""
    return b"\x7fELF".ljust(18, b"\0") + b"\x3e\0" + f"PyInit_{ops}\0".encode()
