"""Runs a sweep in this process: a new one would take longer to import torch than the tiny sweep itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path


def run_sweep(main: Callable[[Sequence[str]], int | None], variant: Path, file: Path, *options: str) -> dict:
    """Return what a sweep's `main` writes to `file` in its tiny run of a variant, which must succeed."""
    assert not main(["--tiny", "--build", str(variant.parent), "--output", str(file), *options])
    return json.loads(file.read_text())
