"""The processor's name: imported by the examples too, which have none of the other files here on their path."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's name as its maker writes it, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
