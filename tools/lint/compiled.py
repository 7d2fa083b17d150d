"""Compile what the package would launch, for a GPU that this machine does not have.

The package's own launcher runs on empty CPU tensors, and its launch is compiled instead of started. It goes Triton's
usual way, so arguments, constants and known multiples of 16 are determined as on a real GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

# Triton identifies AMD's GPUs by name, the package's table of configurations by backend.
GPUS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
PACKAGE = Path(__file__).resolve().parents[2] / "torch-ext/optimizer"


class AbsentGPU(DriverBase):
    """A driver that says what to compile for, and cannot start anything."""

    def __init__(self, name: str):
        self.target = GPUS[name]
        # Triton remembers a device's target by its number, so two targets must not share one.
        self.number = list(GPUS).index(name)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self):
        raise NotImplementedError("nothing runs without a GPU")


class CompiledInstead:
    """Replaces a kernel in its launcher: a launch compiles the kernel and keeps the result in `compiled`."""

    def __init__(self, kernel: Any):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid: tuple):
        return lambda *args, **options: self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))


def kernel_module(package: Path, name: str) -> ModuleType:
    """Return a module of `kernels/`, such as gpu.tuned, of a package folder, which may be the source tree.

    No compiled library is loaded.
    """
    root = f"linted_{package.resolve().as_posix().encode().hex()}"
    if root not in sys.modules:
        sys.modules[root] = ModuleType(root)
        sys.modules[root].__path__ = [str(package)]
        # Replaces the module that would load the build's library.
        native = sys.modules[f"{root}.kernels.native"] = ModuleType(f"{root}.kernels.native")
        native.define_operation = lambda name, schema, functions, tags=(): None
        native.IS_PORTABLE = False
    return importlib.import_module(f"{root}.kernels.{name}")


@contextmanager
def absent_gpu(gpu: str, package: Path, module: ModuleType | None = None) -> Iterator[None]:
    """Make a package's launchers treat CPU tensors as tensors on `gpu`, and Triton compile for it.

    `module` is the package's kernels/gpu/symmetric_gemm.py, if it was not loaded by `kernel_module`.
    """
    module = module or kernel_module(package, "gpu.symmetric_gemm")
    target, on_gpu = GPUS[gpu], module.reads_descriptors
    is_hip = target.backend == "hip"
    driver.set_active(AbsentGPU(gpu))
    with (
        mock.patch.object(torch.version, "hip", "6.0" if is_hip else None),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: divmod(0 if is_hip else target.arch, 10)),
        mock.patch.object(module, "reads_descriptors", lambda device: on_gpu(torch.device("cuda"))),
    ):
        yield


def takes_descriptors(gpu: str, package: Path, panels: Sequence[torch.Tensor] = ()) -> bool:
    """Whether the package uses tensor descriptors on a GPU, and for these operands."""
    module = kernel_module(package, "gpu.symmetric_gemm")
    with absent_gpu(gpu, package):
        return module.reads_descriptors(torch.device("cuda")) and all(map(module.fits_descriptor, panels))


def compile_launch(gpu: str, package: Path, name: str, arguments: Callable[[ModuleType], tuple]) -> Any:
    """Return Triton's compiled kernel for the one launch that `launch_<name>` of kernels/gpu/<name>.py makes.

    `arguments` receives the module and returns the launcher's arguments, made with the module's own classes.
    """
    module = kernel_module(package, f"gpu.{name}")
    instead = CompiledInstead(getattr(module, f"_{name}_kernel"))
    with absent_gpu(gpu, package), mock.patch.object(module, f"_{name}_kernel", instead):
        getattr(module, f"launch_{name}")(*arguments(module))
    (compiled,) = instead.compiled
    return compiled
