"""The kernel that a sweep measures, and where."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import kernels
import torch


def load_built(build: Path) -> tuple[ModuleType, torch.device]:
    """Return the kernel in `build` and the device to measure it on: the GPU, where there is one and it was built for.

    FileNotFoundError, with the reasons, if there is no variant that this torch can load.
    """
    try:
        kernel = kernels.get_local_kernel(build)
    except FileNotFoundError:
        # A CUDA build of torch takes a CPU variant only if it is asked for by name.
        kernel = kernels.get_local_kernel(build, backend="cpu")
    backend = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text())["backend"]["type"]
    return kernel, torch.device("cuda" if backend == "cuda" and torch.cuda.is_available() else "cpu")
