"""Processors that QEMU emulates here, and the Python that runs on each."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.build.commands import BuildError, run
from tools.emulation import debian

# One for each level of x86-64: the second, the second with AVX, the third. Torch itself needs the second.
X86 = ("Nehalem", "SandyBridge", "Haswell")
ARM = "aarch64"
X86_EMULATOR = "qemu-x86_64"


@dataclass(frozen=True)
class Processor:
    """A processor by its name, and the command that runs a Python on it."""

    name: str
    python: tuple[str, ...]

    def fingerprint(self, build: Path) -> dict:
        """Return what `tools.emulation.fingerprint` prints there for the folder of variants `build`.

        Raises `BuildError` with the program's words if it fails, as on an instruction that the processor lacks.
        """
        # Without bytecode, which would be a file of the variant that its digest does not know.
        command = [*self.python, "-B", "-m", "tools.emulation.fingerprint", build.resolve()]
        return json.loads(run(command, cwd=Path(__file__).resolve().parents[2]).splitlines()[-1])


def here() -> Processor:
    """Return the processor of this machine."""
    return Processor("here", (sys.executable,))


def emulated(name: str) -> Processor:
    """Return a processor of `X86` or `ARM`; `BuildError` says what is missing for it and how to get it."""
    if name == ARM:
        return Processor(name, debian.python(debian.ARM_ROOT))
    if shutil.which(X86_EMULATOR) is None:
        raise BuildError(f"there is no {X86_EMULATOR}: apt-get install qemu-user")
    # NumPy's OpenBLAS takes some of the emulated processors for the machine beneath, and dies of an instruction. So it
    # is told what code to run; nothing that is compared comes from it.
    return Processor(name, (X86_EMULATOR, "-E", "OPENBLAS_CORETYPE=Nehalem", "-cpu", name, sys.executable))


def version() -> str:
    """Return the emulator's own version, such as "QEMU 7.2"."""
    return "QEMU " + run([X86_EMULATOR, "--version"]).split("version ")[1].split()[0]
