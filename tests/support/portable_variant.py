"""The package as a variant without a compiled library, made of the Python files of one that has been built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def write_portable_variant(built: Path, folder: Path, backend: str) -> Path:
    """Write `torch-<backend>` into `folder`, with the Python files of the variant `built`, and return its path.

    Its operations have the namespace of those of `built`, as in two variants of one commit. Its id differs, because the
    Hub's loader names modules by it.
    """
    variant = folder / f"torch-{backend}"
    for file in sorted(file for suffix in ("py", "json") for file in built.rglob(f"*.{suffix}")):
        target = variant / file.relative_to(built)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    metadata = json.loads((built / "metadata.json").read_text())
    ops = variant / "_ops.py"
    ops.write_text(ops.read_text().replace(f"from . import {metadata['id']}\n", ""))
    metadata.pop("digest", None)
    changed = {**metadata, "id": f"{metadata['id']}_portable", "backend": {"type": backend}}
    (variant / "metadata.json").write_text(json.dumps(changed))
    return variant
