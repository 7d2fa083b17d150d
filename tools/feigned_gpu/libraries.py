"""The libraries that torch for CUDA loads: its runtime and driver feigned, all others empty.

Torch needs every function by name before it starts, though it calls few. A library gets those functions that torch's
own libraries look for in it, with their versions. Those that nobody defines here return 0, which is success.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tools.build.commands import run

HERE = Path(__file__).resolve().parent
SOURCES = {
    "libcudart.so.13": [HERE / name for name in ("devices.cpp", "memory.cpp", "streams.cpp")],
    "libcuda.so.1": ["-x", "c", HERE.parents[1] / "benchmarks/stubbed_driver.c"],
}
# The beginnings of functions that torch asks for without a version, by the library that has them.
UNVERSIONED = {
    "libnccl.so.2": "nccl",
    "libcusparseLt.so.0": "cusparseLt",
    "libcufile.so.0": "cuFile",
    "libcurand.so.10": "curand",
    "libcuda.so.1": "cu",
}
# Whose functions have a version of another name.
NVSHMEM = "libnvshmem_host.so.3"


def build(torch_libraries: Path, cuda: Path, folder: Path) -> None:
    """Write the libraries for which the files in `torch_libraries` ask into `folder`.

    `cuda` is the folder of CUDA's headers. `BuildError` if a compiler fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, functions in _needed(torch_libraries).items():
        versions, rest = folder / f"{name}.versions", folder / f"{name}.c"
        versions.write_text(f"{'NVSHMEM' if name == NVSHMEM else name} {{ global: *; }};\n")
        # Weak, so that functions of the same name in `SOURCES` take their place.
        weak = (f"__attribute__((weak)) int {function}(void) {{ return 0; }}\n" for function in sorted(functions))
        rest.write_text("".join(weak))
        versioned = [] if name in UNVERSIONED else [f"-Wl,--version-script={versions}"]
        sources = [*SOURCES.get(name, ()), "-x", "c", "-fno-builtin", rest]
        run(
            [
                "g++",
                "-shared",
                "-fPIC",
                "-O2",
                f"-I{cuda}",
                *sources,
                f"-Wl,-soname,{name}",
                *versioned,
                "-o",
                folder / name,
            ]
        )
    link = folder / "libcuda.so"  # the name that linkers look for
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so.1")


def _needed(torch_libraries: Path) -> dict[str, set[str]]:
    """Return the functions that torch's libraries look for in NVIDIA's, by the library."""
    needed: dict[str, set[str]] = defaultdict(set, {name: set() for name in UNVERSIONED})
    for library in sorted(torch_libraries.glob("lib*.so")):
        for line in run(["nm", "-D", "--undefined-only", library]).splitlines():
            function, _, version = line.split()[-1].partition("@")
            owner = _owner(function, version)
            if owner is not None:
                needed[owner].add(function)
    return needed


def _owner(function: str, version: str) -> str | None:
    """Return the library of NVIDIA's that has a function of this version, None for those of others."""
    if version:
        return NVSHMEM if version == "NVSHMEM" else version if version.startswith(("libcu", "libnv")) else None
    return next((name for name, start in UNVERSIONED.items() if function.startswith(start)), None)
