"""The host's part of `hopper_gemm_` by nvcc, as it ships, over the runtime of tests/hopper_model/runtime.cpp."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from tools.build import compilers
from tools.build.commands import BuildError, run
from tools.build.machines import TORCH

MODEL = Path("tests/hopper_model")
# Of torch 2.11, the oldest that the package runs with.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x20b000000000000"
WRAPPED = (
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
    "aoti_torch_get_current_cuda_stream",
    "torch_call_dispatcher",
)
# For which the kernels have no code.
ANOTHER_DEVICE = ["-gencode", "arch=compute_75,code=sm_75"]


class Gpu(NamedTuple):
    """The feigned device, and the function of CUDA or torch that fails there."""

    multiprocessors: int = 132
    major: int = 9
    minor: int = 0
    failing: str = ""


class Map(NamedTuple):
    """A tensor as a launch describes it to the driver; strides in bytes, the innermost dimension first."""

    type: int
    swizzle: int
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Launch(NamedTuple):
    """What a launch was asked with; each tuple has the numbers of a line that host.cu or runtime.cpp tells."""

    allowed: tuple[int, ...]  # kernel, attribute, bytes of shared memory
    launch: tuple[int, ...]  # kernel, blocks, 1, threads, 1, bytes of shared memory, stream, device
    attribute: tuple[int, ...]  # its number, the three sizes of a cluster
    kernel: tuple[int, ...]  # whether float16, A by rows, B by columns; bytes that its shared memory needs
    maps: dict[str, Map]  # A, B, C
    memory: tuple[int, int]  # addresses of sums and of arrivals
    sections: tuple[int, ...]  # squares along a side, cut ones, sections of these, of all matrices
    sizes: tuple[int, ...]  # m, k, matrices, bytes that a step waits for
    scalars: tuple[float, ...]
    addend: tuple[int, int, int]  # address, strides of a matrix and of a row in elements


class Asked(NamedTuple):
    """What a call asked for, in its order: memory (address, bytes, device, whether on a GPU), zeros, launches."""

    allocated: list[tuple[int, ...]]
    zeros: list[tuple[int, ...]]  # address, value, bytes, stream, device
    launches: list[Launch]
    order: str  # a letter for each: m for memory, z for zeros, l for a launch


def what_is_missing() -> str:
    """What keeps the host's part from being compiled here; empty if nothing does."""
    try:
        compilers.find_cuda()
    except BuildError as error:
        return str(error)
    return "" if compilers.find_cutlass() else "there are no headers of CUTLASS: requirements/cuda.txt"


USUAL = Gpu()


class Host:
    """The loaded library."""

    def __init__(self, library: Path):
        torch.ops.load_library(str(library))
        self.functions = ctypes.CDLL(str(library))
        self.functions.hopper_host_told.restype = ctypes.c_char_p

    def call(self, operands: tuple, scalars: tuple = (1.0, 0.0, 0.0), sections: int = 1, gpu: Gpu = USUAL) -> Asked:
        """Return what a call with the operands (C, A, B, D) asks for."""
        self.functions.hopper_host_begin(*gpu[:3], gpu.failing.encode())
        torch.ops.hopper_host.product(*operands, *scalars, sections)
        return self.asked()

    def asked(self) -> Asked:
        """Return what the last call has asked for, also if it failed; a launch counts once it has its parameters."""
        return _read(self.functions.hopper_host_told().decode())

    def current_device(self) -> int:
        """Return the device that is current now; -1 where no call has set one."""
        return self.functions.hopper_host_device()


def build(repository: Path, folder: Path) -> Host:
    """Compile and load it. Its kernels are empty, so that there is only the host's part to compile."""
    cuda = compilers.find_cuda()
    headers = [TORCH / "include", TORCH / "include/torch/csrc/api/include", cuda.home / "include"]
    options = ["-std=c++20", "-O1", "-DNDEBUG", "-DUSE_CUDA=1", STABLE_ABI, *(f"-I{header}" for header in headers)]
    host, runtime, library = folder / "host.o", folder / "runtime.o", folder / "hopper_host.so"
    by_nvcc = [*options, f"-I{compilers.find_cutlass()}", "-w", "--expt-relaxed-constexpr", *ANOTHER_DEVICE]
    run([cuda.nvcc, *by_nvcc, "-Xcompiler", "-fPIC", "-c", repository / MODEL / "host.cu", "-o", host])
    run(["g++", *options, "-fPIC", "-c", repository / MODEL / "runtime.cpp", "-o", runtime])
    libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    link_options = ["-Wl,-Bsymbolic", *(f"-Wl,--wrap={name}" for name in WRAPPED)]
    run(["g++", "-shared", host, runtime, "-o", library, *link_options, *libraries])
    return Host(library)


def _read(told: str) -> Asked:
    asked, lines, order = Asked([], [], [], ""), [line.split() for line in told.splitlines()], ""
    of_launch: dict[str, tuple[int, ...]] = {}
    for what, *words in lines:
        numbers = tuple(map(int, words))
        if what == "allocate":
            asked.allocated.append(numbers)
        elif what == "set":
            asked.zeros.append(numbers)
        else:
            of_launch[what] = numbers
        if what == "D":  # the last line of a launch
            asked.launches.append(_launch(of_launch))
            of_launch = {}
        order += {"allocate": "m", "set": "z", "launch": "l"}.get(what, "")
    return asked._replace(order=order)


def _launch(of: dict[str, tuple[int, ...]]) -> Launch:
    maps = {name: _map(of[name]) for name in "ABC"}
    scalars = struct.unpack("3f", struct.pack("3i", *of["scalars"]))
    plain = (of[name] for name in ("allow", "launch", "attribute", "kernel"))
    return Launch(*plain, maps, of["memory"], of["sections"], of["sizes"], scalars, of["D"])


def _map(numbers: tuple[int, ...]) -> Map:
    rank, kind, swizzle, address, *rest = numbers
    return Map(kind, swizzle, address, *(tuple(rest[i * rank : (i + 1) * rank]) for i in range(3)))
