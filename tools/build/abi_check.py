"""What a compiled library requires of the machine that loads it, compared with what the Hub promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kernel_abi_check import ObjectFile

from tools.build.commands import BuildError, run
from tools.build.compilers import CUDART, Job

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
# What only a CUDA build of torch exports. A CPU build does to link a CUDA variant with, and cannot be asked for these.
FROM_CUDA_TORCH = ("aoti_torch_get_current_cuda_stream",)
SHIM_HEADERS = ("torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h")


def violations(library: Path, job: Job) -> list[str]:
    """Return what is wrong with the unstripped `library` of `job`; an empty list if it may be published.

    Raises `BuildError` for a stripped library: kernel-abi-check reads the symbol table, and without one it would find
    no fault.
    """
    if ".symtab" not in run(["readelf", "--sections", "--wide", library]):
        raise BuildError(f"{library.name} is stripped, its symbols cannot be checked")
    binary, abi = ObjectFile(str(library)), job.recipe.torch_abi
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run(["readelf", "--dynamic", "--wide", library]))
    return [
        *(f"Python ABI {PYTHON_ABI}: {violation}" for violation in binary.check_python_abi(PYTHON_ABI)),
        *(f"{MANYLINUX}: {violation}" for violation in binary.check_manylinux(MANYLINUX)),
        *(f"torch stable ABI {abi}: {violation}" for violation in _unstable_symbols(library, abi, job.machine.torch)),
        *(f"not linked against {name}" for name in _required_libraries(job.recipe.backend) if name not in needed),
        *(f"undefined symbol: {name}" for name in _undefined_symbols(library, needed, job)),
    ]


def newest_version(library: Path, family: str) -> str:
    """Return the newest version of a symbol family such as GLIBC that `library` needs, "none" if it needs none."""
    versions = re.findall(rf"@{family}_([\d.]+)", run(["readelf", "--dyn-syms", "--wide", library]))
    return max(versions, key=_version, default="none")


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _required_libraries(backend: str) -> list[str]:
    return ["libtorch.so"] + ([CUDART] if backend == "cuda" else [])


def _symbols(library: Path, kind: str) -> list[str]:
    """Return the dynamic symbols of `library`, without versions, whose columns in readelf's table match `kind`."""
    table = run(["readelf", "--dyn-syms", "--wide", library])
    return re.findall(rf"^.* {kind} ([^\s@]+)", table, re.MULTILINE)


@cache
def _exports(library: Path) -> frozenset[str]:
    """The symbols that an installed library has for others."""
    return frozenset(_symbols(library, r"(?:GLOBAL|WEAK|UNIQUE) +\w+ +\d+"))


def _demangled(names: list[str]) -> list[str]:
    if not names:
        return []
    return run(["c++filt"], stdin="\n".join(names)).splitlines()


def _unstable_symbols(library: Path, torch_abi: str, torch: Path) -> Iterator[str]:
    """Yield torch symbols that another torch may lack: C++ outside `torch::stable`, C shims newer than `torch_abi`."""
    names = _symbols(library, r"\w+ +\w+ +UND")
    for name in _demangled(names):
        if re.match(r"(c10|at|torch)::", name) and not name.startswith("torch::stable::"):
            yield f"{name} is not part of it"
    introduced = shim_versions(torch)
    for name in names:
        if _version(introduced.get(name, "0")) > _version(torch_abi):
            yield f"{name} came with torch {introduced[name]}"


def _undefined_symbols(library: Path, needed: list[str], job: Job) -> list[str]:
    """Return the symbols that `library` needs and none of the libraries `needed` exports, so that importing would fail.

    Linkers refuse them if told to, but also those of Python, which the interpreter has and no library to link with.
    """
    folders = [job.machine.torch / "lib", *(job.cuda.library_folders(job.machine) if job.cuda else [])]
    exported = set(FROM_CUDA_TORCH if job.cuda else ())
    for name in needed:
        paths = [folder / name for folder in folders if (folder / name).exists()] or [job.machine.library(name)]
        exported |= _exports(paths[0])
    names = _symbols(library, r"(?:GLOBAL|UNIQUE) +\w+ +UND")
    return _demangled([name for name in names if name not in exported and not re.match("_?Py", name)])


def shim_versions(torch: Path) -> dict[str, str]:
    """Return the version, as "2.12", of torch that introduced each C function whose header guards it by version."""
    introduced = {}
    # Other conditions are nested inside, so a block ends at the #endif that names this one.
    guarded = r"^#if TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_\d+$(.*?)^#endif // TORCH_FEATURE_VERSION"
    for header in SHIM_HEADERS:
        text = (torch / "include" / header).read_text()
        for major, minor, block in re.findall(guarded, text, re.MULTILINE | re.DOTALL):
            introduced |= dict.fromkeys(re.findall(r"\b((?:aoti_)?torch_\w+)\(", block), f"{major}.{minor}")
    return introduced
