"""Facts in a results file about the machine that it was measured on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.built_kernel import read_metadata


def cpu_name() -> str:
    """Return the processor's name as its maker writes it, if the system says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def triton_version() -> str | None:
    """Return the version of the installed triton; None without one."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def describe(kernel: ModuleType, device: torch.device) -> dict:
    """Return the device, the versions and the commit that the loaded kernel was built from."""
    built = read_metadata(Path(kernel.__file__).parent)["provenance"]["kernel"]
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "commit": built["commit"],
        "dirty": built["dirty"],
    }
