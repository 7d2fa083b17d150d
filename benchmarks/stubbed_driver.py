"""Triton's own launcher over a driver that does nothing: a launch takes the host its usual time but starts nothing.

All of Triton runs as with a GPU, including its part in C. Only what the driver itself would do is missing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.nvidia import driver as nvidia

from tools.build.commands import run
from tools.lint import compiled

SOURCE = Path(__file__).with_suffix(".c")
INCLUDE = Path(nvidia.__file__).parent / "include"


class StubbedGPU(compiled.AbsentGPU):
    """A fake GPU, with Triton's launcher for a real one."""

    launcher_cls = nvidia.CudaLauncher
    utils: Any = None  # Triton's functions in C, once they are compiled


@functools.cache
def build() -> ctypes.CDLL:
    """Return the driver, compiled and loaded under the name that Triton looks for.

    It stays until the process ends, because Triton looks each function of a driver up once. So a process that uses a
    GPU must not call this.
    """
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    library = folder / "libcuda.so.1"
    run(["cc", "-shared", "-fPIC", "-O2", f"-I{INCLUDE}", "-Wl,-soname,libcuda.so.1", "-o", library, SOURCE])
    (folder / "libcuda.so").symlink_to(library)  # the name that linkers look for
    driver = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = str(folder)
    StubbedGPU.utils = nvidia.CudaUtils()
    return driver


@contextmanager
def stubbed_gpu(gpu: str, package: Path, module: ModuleType | None = None) -> Iterator[ctypes.CDLL]:
    """Make launches of a package run on CPU tensors as on `gpu`; the driver's `launches_so_far` counts them.

    `module` is as in `absent_gpu`.
    """
    driver = build()
    with (
        mock.patch.object(compiled, "AbsentGPU", StubbedGPU),
        mock.patch.object(torch.cuda, "get_device_name", lambda device: "a stubbed GPU"),
        mock.patch.object(torch.cuda, "current_device", lambda: -1),  # the index of CPU tensors
        compiled.absent_gpu(gpu, package, module),
    ):
        yield driver
