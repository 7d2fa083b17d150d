"""What the builder has put beside the code: `metadata.json`, and in some variants a compiled library."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Optional

VARIANT = Path(__file__).parents[1]
FILE = VARIANT / "metadata.json"
_LIBRARIES = {".so", ".pyd"}


@functools.cache
def read_metadata() -> dict[str, Any]:
    """Return the contents of `metadata.json`, which are not to be changed; {} where no builder has written one."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def libraries() -> list[Path]:
    """Return the compiled libraries in the variant's folder: none in portable variants, else one."""
    return [path for path in VARIANT.iterdir() if path.suffix in _LIBRARIES]


def library_name() -> Optional[str]:
    """Return the name of the compiled library in the variant's folder, None if there is none, as in portable variants.

    The library registers its operations in the namespace of this name.
    """
    return next((path.name.partition(".")[0] for path in libraries()), None)
