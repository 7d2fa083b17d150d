"""The moves of somebody who can write into a cache of the Hub's client: each gives a function that takes the cache.

A cache is the folder of a repository, `kernels--org--tiny`, with one snapshot that has `write_compiled_variant`'s
variant, the one that the loader prefers.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.compiled_variants import FOREIGN, NAME
from tests.support.hub_clients import digest_again

Tampering = Callable[[Path], None]
UNCHECKED_HASH = 1


def variant_in(cache: Path) -> Path:
    (variant,) = cache.glob(f"snapshots/*/build/{NAME}")
    return variant


def forged(text: str) -> str:
    """The code of a module that does what it did, and more."""
    return text + FOREIGN


def put(file: Path, content: str | bytes) -> None:
    """Write a file, in place of a link and not through it."""
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def written(name: str, content: str | bytes) -> Tampering:
    """Put a file into the variant."""
    return lambda cache: put(variant_in(cache) / name, content)


def edited(name: str, edit: Callable[[str], str] = forged) -> Tampering:
    """Put an edited copy in place of a file of the variant."""
    return lambda cache: put(variant_in(cache) / name, edit((variant_in(cache) / name).read_text()))


def edited_blob(name: str, edit: Callable[[bytes], bytes]) -> Tampering:
    """Edit the blob to which a file of the variant is linked."""

    def tamper(cache: Path) -> None:
        blob = (variant_in(cache) / name).resolve()
        blob.write_bytes(edit(blob.read_bytes()))

    return tamper


def described(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Tampering:
    """Edit what metadata.json says."""
    return edited("metadata.json", lambda text: json.dumps(edit(json.loads(text)), indent=2))


def digested(edit: Callable[[dict[str, str]], dict[str, str]]) -> Tampering:
    """Edit the files that the digest knows."""
    return described(lambda said: {**said, "digest": {**said["digest"], "files": edit(said["digest"]["files"])}})


def in_order(*tamperings: Tampering) -> Tampering:
    def tamper(cache: Path) -> None:
        for each in tamperings:
            each(cache)

    return tamper


def digested_again(cache: Path) -> None:
    """Make the digest fit again, as whoever can change files can do."""
    metadata = variant_in(cache) / "metadata.json"
    put(metadata, metadata.read_bytes())
    digest_again(variant_in(cache))


def removed(name: str) -> Tampering:
    return lambda cache: (variant_in(cache) / name).unlink()


def without_listing(cache: Path) -> None:
    """Delete what the client noted of the repository's files, so that it misses none."""
    shutil.rmtree(cache / "trees")


def linked(name: str, target: str) -> Tampering:
    """Put a link in place of a file of the variant."""

    def tamper(cache: Path) -> None:
        file = variant_in(cache) / name
        file.unlink(missing_ok=True)
        file.symlink_to(target)

    return tamper


def linked_outside(name: str, edit: Callable[[str], str] = forged) -> Tampering:
    """Put a link to an edited copy out of the cache in place of a file of the variant."""

    def tamper(cache: Path) -> None:
        file, outside = variant_in(cache) / name, cache.parent / f"outside {name}"
        outside.write_text(edit(file.read_text()))
        file.unlink()
        file.symlink_to(outside)

    return tamper


def linked_folder(folder: Callable[[Path], Path]) -> Tampering:
    """Put a link in place of a folder, and a copy, whose modules are forged, where it leads."""

    def tamper(cache: Path) -> None:
        here, outside = folder(cache), cache.parent / "outside"
        shutil.copytree(here, outside)
        for module in outside.rglob("__init__.py"):
            module.write_text(forged(module.read_text()))
        shutil.rmtree(here)
        here.symlink_to(outside)

    return tamper


def planted(name: str) -> Tampering:
    """Put a forged copy of the variant beside it."""

    def tamper(cache: Path) -> None:
        variant = shutil.copytree(variant_in(cache), variant_in(cache).parent / name)
        (variant / "__init__.py").write_text(forged((variant / "__init__.py").read_text()))
        digest_again(variant)

    return tamper


def cached(name: str, unchecked: bool = True, to: str = "") -> Tampering:
    """Put forged bytecode of a module where Python looks for it, or at `to`; its hash or its source's time is right."""

    def tamper(cache: Path) -> None:
        source = variant_in(cache) / name
        code = marshal.dumps(compile(forged(source.read_text()), str(source), "exec"))
        about = source.stat()
        checked = struct.pack("<III", 0, int(about.st_mtime) & 0xFFFFFFFF, about.st_size & 0xFFFFFFFF)
        header = struct.pack("<IQ", UNCHECKED_HASH, 0) if unchecked else checked
        place = variant_in(cache) / to if to else Path(importlib.util.cache_from_source(str(source)))
        put(place, importlib.util.MAGIC_NUMBER + header + code)

    return tamper
