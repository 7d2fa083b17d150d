"""Whether a built variant loads: the Hub's loader imports it, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.build.abi_check import FROM_CUDA_TORCH
from tools.build.commands import BuildError, run
from tools.build.compilers import CUDART, Cuda, Job
from tools.build.machines import Machine

IMPORT = """\
import ctypes, os, pathlib, sys
os.environ.pop("LOCAL_KERNELS", None)  # which names other folders, or nothing that can be read
import kernels, torch
for library in sys.argv[2:]:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
print("torch", torch.__version__, end="")
"""


def load(variant: Path, job: Job) -> str:
    """Import the folder `variant`, which does not change; return which torch did, or why none here can.

    Raises `BuildError` with the traceback if importing fails.
    """
    if job.machine is not None and not job.machine.is_here:
        return f"not loaded: for {job.machine.name}"
    first = what_a_cpu_torch_lacks(job)
    try:
        # Bytecode would be a file of the variant that its digest does not know.
        by = run([sys.executable, "-B", "-c", IMPORT, variant, *first])
    except BuildError as error:
        raise BuildError(f"{variant.name} was built and cannot be imported: {error}") from None
    return f"{by} with stubs of CUDA's" if first else by


def what_a_cpu_torch_lacks(job: Job) -> list[Path]:
    """Return libraries without which a torch that has no CUDA cannot import the variant of `job`."""
    if job.cuda is None or (job.machine.torch / "lib/libtorch_cuda.so").exists():
        return []
    return libraries_of_cuda(job.cuda, job.machine, job.work)


def libraries_of_cuda(cuda: Cuda, machine: Machine, folder: Path) -> list[Path]:
    """Return libcudart, and a library made in `folder` that has stubs of what a CUDA build of torch exports."""
    source, stubs = folder / "cuda_torch.cpp", folder / "cuda_torch.so"
    source.write_text("".join(f'extern "C" int {name}(...) {{ return 1; }}\n' for name in FROM_CUDA_TORCH))
    run([*machine.compiler, "-shared", "-fPIC", source, "-o", stubs])
    cudart = [folder / CUDART for folder in cuda.library_folders(machine)]
    return [*(library for library in cudart if library.exists()), stubs]
