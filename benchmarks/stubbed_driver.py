"""Triton's own launcher over a driver that does nothing: a launch takes the host its usual time but starts nothing.

All of Triton runs as with a GPU, including its part in C. Only what the driver itself would do is missing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
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
DRIVER = "libcuda.so.1"
INCLUDE = Path(nvidia.__file__).parent / "include"


class StubbedGPU(compiled.AbsentGPU):
    """A fake GPU, with Triton's launcher for a real one."""

    launcher_cls = nvidia.CudaLauncher
    utils: Any = None  # Triton's functions in C, once they are compiled


@functools.cache
def build() -> ctypes.CDLL:
    """Return the driver, compiled and loaded under the name that Triton looks for.

    It stays until the process ends, because Triton looks each function of a driver up once. RuntimeError if the process
    has loaded a GPU's driver, as it does to ask torch whether there is a GPU: Triton would find that one.
    """
    if is_loaded(DRIVER):
        raise RuntimeError("need a process that has not asked for a GPU: Triton would launch by the GPU's own driver")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    library = folder / DRIVER
    run(["cc", "-shared", "-fPIC", "-O2", f"-I{INCLUDE}", f"-Wl,-soname,{DRIVER}", "-o", library, SOURCE])
    (folder / "libcuda.so").symlink_to(library)  # the name that linkers look for
    driver = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = str(folder)
    StubbedGPU.utils = nvidia.CudaUtils()
    return driver


def is_loaded(library: str) -> bool:
    """Whether this process has loaded a library of this name."""
    try:
        ctypes.CDLL(library, os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


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
