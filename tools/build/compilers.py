"""Compile and link lines of the two backends, the same as in the Hub's builder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tools.build.commands import BuildError, run
from tools.build.generated_sources import GLIBC_SHIM_CPP, REGISTRATION_H
from tools.build.machines import Machine
from tools.build.recipe import COMPILED, GENERATED_HEADER, Recipe
from tools.build.source_tree import Revision

CUDA_MAJOR = 13
HOST_COMPILER = "host_compiler"
CUDART = f"libcudart.so.{CUDA_MAJOR}"
PYTHON_HEADERS = Path(sysconfig.get_path("include"))
# Where the toolkit's installer puts nvcc; it leaves the PATH to the user.
NVCC_FOLDER = "/usr/local/cuda/bin"

# Symbols that are the same in every library of a process would keep two revisions from working side by side. Of the
# compilers that nvcc calls and CXX may name, only GCC makes such symbols, and has this flag.
NOT_UNIQUE = "-fno-gnu-unique"

# nvcc splits lists at commas, quoted or not, and passes its commands to a shell.
NOT_FOR_NVCC = set(",'\"`$\\\n")


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit: its compiler, its folder, and its version such as "13.0"."""

    nvcc: str
    home: Path
    version: str

    def library_folders(self, machine: Machine) -> list[Path]:
        """Return where the libcudart of `machine` may be: in the toolkit, or for another machine beside its torch.

        The toolkit is as it is installed or as it is packed for PyPI, and beside torch is what PyPI has for it.
        """
        if machine.is_here:
            return [self.home / folder for folder in ("lib64", "lib")]
        return [machine.torch.parent / f"nvidia/cu{CUDA_MAJOR}/lib"]


@dataclass(frozen=True)
class Job:
    """One variant to build from the repository `root`; intermediate files go into the folder `work`.

    `cuda` and `machine` are None for a variant that is built without them.
    """

    root: Path
    recipe: Recipe
    revision: Revision
    work: Path
    cuda: Cuda | None
    machine: Machine | None = None

    @property
    def ops(self) -> str:
        """The op namespace, which is also the library's name and the variant's id."""
        return f"_{self.recipe.name}_{self.recipe.backend}_{self.revision.unique_id}"

    @property
    def variant_name(self) -> str:
        """The folder's name, by which the Hub's loader chooses a variant."""
        backend = f"cu{self.cuda.version.replace('.', '')}" if self.cuda else self.recipe.backend
        return f"torch-stable-abi{self.recipe.torch_abi.replace('.', '')}-{backend}-{self.machine.name}"


def find_nvcc() -> str | None:
    """Return the path of the nvcc that is on the PATH, else of that in `NVCC_FOLDER`; None if there is none."""
    return shutil.which("nvcc") or shutil.which("nvcc", path=NVCC_FOLDER)


def find_cuda() -> Cuda:
    """Return the toolkit of the installed nvcc. `BuildError` says what was found instead and how to get it."""
    how = f"install the CUDA {CUDA_MAJOR} toolkit (nvcc, cudart, cccl), its nvcc on the PATH or in {NVCC_FOLDER}"
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(f"there is no nvcc; {how}")
    release = re.search(r"release (\d+)\.(\d+)", run([nvcc, "--version"]))
    if release is None or int(release[1]) != CUDA_MAJOR:
        raise BuildError(f"nvcc is of CUDA {release[0] if release else 'an unknown release'}; {how}")
    # nvcc may be a script that starts another one, so ask it for its home folder.
    home = re.search(r"TOP=(.+)", run(["sh", "-c", '"$0" --dryrun -c none.cu 2>&1', nvcc]))
    if home is None:
        raise BuildError(f"{nvcc} does not tell its toolkit's folder; {how}")
    return Cuda(nvcc, Path(home[1].strip()).resolve(), f"{release[1]}.{release[2]}")


def check_cudart(cuda: Cuda, machine: Machine) -> None:
    """Raise `BuildError` if another `machine`'s libcudart is not here. For this machine the linker looks further."""
    folders = cuda.library_folders(machine)
    if not machine.is_here and not any((folder / CUDART).exists() for folder in folders):
        where = " or ".join(map(str, folders))
        raise BuildError(f"there is no {CUDART} for {machine.processor} in {where}: make torch-{machine.processor}")


def check_headers(recipe: Recipe, machine: Machine) -> None:
    """Raise `BuildError` unless Python's headers exist, CUTLASS's if needed, and torch's are new enough."""
    if not (PYTHON_HEADERS / "Python.h").is_file():
        raise BuildError(f"Python.h is not in {PYTHON_HEADERS}; install Python's development headers")
    installed = machine.torch_version
    if tuple(map(int, installed.split(".")[:2])) < tuple(map(int, recipe.torch_abi.split("."))):
        raise BuildError(f"torch {installed} is older than the stable ABI {recipe.torch_abi} of build.toml")
    if recipe.needs_cutlass and find_cutlass() is None:
        raise BuildError("there are no headers of CUTLASS; pip install --no-deps --requirement requirements/cuda.txt")


def find_cutlass() -> Path | None:
    """Return the folder of CUTLASS's headers, which its package from PyPI holds; None if that is not installed."""
    spec = find_spec("cutlass_library")
    folders = [Path(folder, "source/include") for folder in spec.submodule_search_locations] if spec else []
    return next((folder for folder in folders if (folder / "cutlass/version.h").is_file()), None)


def check_paths(job: Job) -> None:
    """Raise `BuildError` if nvcc would misread one of the paths that it gets."""
    for folder in [job.root, *include_folders(job)] if job.cuda else []:
        characters = sorted(NOT_FOR_NVCC & set(str(folder)))
        if characters:
            raise BuildError(f"nvcc cannot take a path with {characters[0]!r} in it: {folder}; use another folder")


def compile_library(job: Job) -> Path:
    """Return the linked, unstripped library; `BuildError` carries the compiler's message."""
    job.work.mkdir(parents=True, exist_ok=True)
    (job.work / GENERATED_HEADER).write_text(REGISTRATION_H)
    (job.work / "glibc_shim.cpp").write_text(GLIBC_SHIM_CPP)
    # nvcc takes the compiler's name without options. CXX may have some, or a launcher before it, such as ccache.
    (job.work / HOST_COMPILER).write_text(f'#!/bin/sh\nexec {shlex.join(job.machine.compiler)} "$@"\n')
    (job.work / HOST_COMPILER).chmod(0o755)
    sources = [source for source in job.recipe.sources if source.suffix in COMPILED]
    pairs = [(source, job.work / f"{number}.o") for number, source in enumerate(sources)]
    pairs.append((job.work / "glibc_shim.cpp", job.work / "glibc_shim.o"))
    library = job.work / f"{job.ops}.abi3.so"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: run(compile_line(job, *pair), cwd=job.root), pairs))
    run(link_line(job, [target for _, target in pairs], library), cwd=job.root)
    return library


def strip(library: Path, machine: Machine) -> None:
    """Drop the symbols that loading does not need; changes the file."""
    run([machine.program("strip"), "--strip-unneeded", library])


def compile_line(job: Job, source: Path, target: Path) -> list[str | Path]:
    """Return the command that compiles `source`, to be run in the repository."""
    # With relative sources and mapped prefixes, the library contains no path of the building machine.
    host = ["-fPIC", "-fvisibility=hidden", f"-ffile-prefix-map={job.root}=."]
    host += [f"-ffile-prefix-map={job.machine.torch}=torch", f"-ffile-prefix-map={job.work}=."]
    if source.suffix == ".cu":
        compiler = [*_nvcc(job), "--expt-relaxed-constexpr", *gencodes(job.recipe.archs_of[source])]
        compiler += [f'-Xcompiler="{flag}"' for flag in (*host, NOT_UNIQUE)]
        # A source's absolute path goes into the names that kernels without external linkage get.
        compiler += ["-Xcudafe", f"--orig_src_path_name={source}"]
    else:
        compiler = [*job.machine.compiler, *host, *([NOT_UNIQUE] if job.machine.takes(NOT_UNIQUE) else [])]
    folders = [f"-I{folder}" for folder in include_folders(job)]
    return [*compiler, "-O3", "-DNDEBUG", "-std=c++20", *_definitions(job), *folders, "-c", source, "-o", target]


def _nvcc(job: Job) -> list[str | Path]:
    """Return the command that starts nvcc; for another machine it calls the compiler for that machine.

    nvcc then looks for headers in a folder for that machine, which most toolkits lack. All machines have the same ones.
    """
    if job.machine.is_here:
        return [job.cuda.nvcc]
    return [job.cuda.nvcc, "-ccbin", job.work / HOST_COMPILER, "-isystem", job.cuda.home / "include/cccl"]


def _definitions(job: Job) -> list[str]:
    major, minor = map(int, job.recipe.torch_abi.split("."))
    backend = {"cpu": ["-DCPU_KERNEL"], "cuda": ["-DCUDA_KERNEL", "-DUSE_CUDA=1"]}[job.recipe.backend]
    return [
        f"-DTORCH_EXTENSION_NAME={job.ops}",
        "-DPy_LIMITED_API=0x03090000",
        f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}",
        *backend,
    ]


def include_folders(job: Job) -> list[Path]:
    """Return the folders in which headers are searched, besides the source's own folder."""
    torch = job.machine.torch / "include"
    folders = [job.work, torch, torch / "torch/csrc/api/include", PYTHON_HEADERS]
    if job.cuda:
        folders.append(job.cuda.home / "include")
    return [*folders, find_cutlass()] if job.recipe.needs_cutlass else folders


def gencodes(archs: tuple[str, ...]) -> list[str]:
    """Return nvcc's flags: machine code for each of `archs`, and for "+PTX" also PTX, which newer devices can use."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        for code in ("sm", "compute") if arch.endswith("+PTX") else ("sm",):
            flags += ["-gencode", f"arch=compute_{number},code={code}_{number}"]
    return flags


def link_line(job: Job, objects: list[Path], library: Path) -> list[str | Path]:
    """Return the command that links `objects`."""
    # libtorch.so has to stay although nothing refers to it: only through it are the symbols of
    # libtorch_cuda.so found. They come before libstdc++ because they export C++20 symbols that
    # manylinux_2_28's libstdc++ does not have.
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--as-needed"]
    torch = [f"-L{job.machine.torch / 'lib'}", *libraries]
    cuda = []
    if job.cuda:
        # The shared cudart: the static one needs glibc 2.34.
        cuda = [*(f"-L{folder}" for folder in job.cuda.library_folders(job.machine)), f"-l:{CUDART}"]
    return [*job.machine.compiler, "-shared", "-o", library, *objects, *torch, *cuda]
