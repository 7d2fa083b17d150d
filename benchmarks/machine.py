"""What a result file says of where it was measured."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import ModuleType

import torch


def cpu_name() -> str:
    """Return the processor's name as its maker writes it, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe(kernel: ModuleType, device: torch.device) -> dict:
    """Return the device, the versions and the commit that the loaded kernel was built from."""
    metadata = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text())
    built = metadata["provenance"]["kernel"]
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": built["commit"],
        "dirty": built["dirty"],
    }
