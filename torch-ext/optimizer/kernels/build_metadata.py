"""What the builder has put beside the code: `metadata.json`, and in some variants a compiled library."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

VARIANT = Path(__file__).parents[1]
FILE = VARIANT / "metadata.json"
_LIBRARIES = {".so", ".pyd"}


@functools.cache
def read_metadata() -> dict[str, Any]:
    """Return the contents of `metadata.json`, which are not to be changed; {} where no builder has written one."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def has_library() -> bool:
    """Whether a compiled library is in the variant's folder. A portable variant has none."""
    return any(path.suffix in _LIBRARIES for path in VARIANT.iterdir())
