"""The other machine that variants are made for."""

from __future__ import annotations

import platform
from pathlib import Path

from tools.build.commands import BuildError, run
from tools.build.machines import PROCESSORS, find_machine
from tools.build.variants import toolkit

HERE = platform.machine()
OTHER = next(processor for processor in PROCESSORS if processor != HERE)


def missing_for(processor: str, backend: str = "cpu") -> str:
    """Return what keeps a variant for `processor` from being made here, and how to get it; "" if nothing does."""
    try:
        machine = find_machine(processor)
        toolkit(backend, machine)
        return "" if machine.torch_version else "no version"
    except BuildError as error:
        return str(error)


def code_for_gpus(library: Path, processor: str, folder: Path) -> list[bytes]:
    """Return what nvcc has put into `library` for the driver: the machine code and PTX of each source for CUDA.

    `folder` is for a file that is made on the way.
    """
    section = folder / f"{library.name}.fatbin"
    objcopy = find_machine(processor).program("objcopy")
    run([objcopy, "--output-target=binary", "--only-section=.nv_fatbin", library, section])
    # Each begins with these four bytes, and ends with zeros up to where the next one is aligned.
    return [part.rstrip(b"\0") for part in section.read_bytes().split(b"\x50\xed\x55\xba")[1:]]
