"""What a compiled library requires of the machine that loads it, compared with what the Hub promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kernel_abi_check import ObjectFile

from tools.build.commands import BuildError, run
from tools.build.compilers import CUDA_MAJOR, TORCH
from tools.build.recipe import Recipe

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
SHIM_HEADERS = ("torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h")


def violations(library: Path, recipe: Recipe) -> list[str]:
    """Return what is wrong with the unstripped `library`; an empty list if it may be published.

    Raises `BuildError` for a stripped library: kernel-abi-check reads the symbol table, and without one it would find
    no fault.
    """
    if ".symtab" not in run(["readelf", "--sections", "--wide", library]):
        raise BuildError(f"{library.name} is stripped, its symbols cannot be checked")
    binary = ObjectFile(str(library))
    return [
        *(f"Python ABI {PYTHON_ABI}: {found}" for found in binary.check_python_abi(PYTHON_ABI)),
        *(f"{MANYLINUX}: {found}" for found in binary.check_manylinux(MANYLINUX)),
        *(f"torch stable ABI {recipe.torch_abi}: {found}" for found in _unstable_symbols(library, recipe.torch_abi)),
        *(f"not linked against {name}" for name in _missing_libraries(library, recipe.backend)),
    ]


def newest_version(library: Path, family: str) -> str:
    """Return the newest version of a symbol family such as GLIBC that `library` needs, "none" if it needs none."""
    found = re.findall(rf"@{family}_([\d.]+)", run(["nm", "-D", "--undefined-only", library]))
    return max(found, key=_version, default="none")


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _missing_libraries(library: Path, backend: str) -> Iterator[str]:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run(["readelf", "--dynamic", "--wide", library]))
    wanted = ["libtorch.so"] + ([f"libcudart.so.{CUDA_MAJOR}"] if backend == "cuda" else [])
    return (name for name in wanted if name not in needed)


def _unstable_symbols(library: Path, torch_abi: str) -> Iterator[str]:
    """Yield torch symbols that another torch may lack: C++ outside `torch::stable`, C shims newer than `torch_abi`."""
    undefined = run(["nm", "-D", "--undefined-only", "--format=posix", library])
    names = [line.split()[0].split("@")[0] for line in undefined.splitlines()]
    for name in run(["c++filt"], stdin="\n".join(names)).splitlines():
        if re.match(r"(c10|at|torch)::", name) and not name.startswith("torch::stable::"):
            yield f"{name} is not part of it"
    introduced = shim_versions()
    for name in names:
        if _version(introduced.get(name, "0")) > _version(torch_abi):
            yield f"{name} came with torch {introduced[name]}"


def shim_versions() -> dict[str, str]:
    """Return the torch version, as "2.12", that introduced each C function whose header guards it by version."""
    introduced = {}
    # Other conditions are nested inside, so a block ends at the #endif that names this one.
    guarded = r"^#if TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_\d+$(.*?)^#endif // TORCH_FEATURE_VERSION"
    for header in SHIM_HEADERS:
        text = (TORCH / "include" / header).read_text()
        for major, minor, block in re.findall(guarded, text, re.MULTILINE | re.DOTALL):
            introduced |= dict.fromkeys(re.findall(r"\b((?:aoti_)?torch_\w+)\(", block), f"{major}.{minor}")
    return introduced
