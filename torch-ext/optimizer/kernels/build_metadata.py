"""What the builder wrote about this build into `metadata.json`, beside the code."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "metadata.json"


@functools.cache
def read_metadata() -> dict[str, Any]:
    """Return the contents of `metadata.json`, which are not to be changed; {} where no builder has written one."""
    return json.loads(_FILE.read_text(encoding="utf-8")) if _FILE.is_file() else {}
