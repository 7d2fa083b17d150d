"""The machines that variants are made for: the compiler that makes code for one, and the torch to link with."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from tools.build.commands import BuildError, run

PROCESSORS = ("x86_64", "aarch64")
TORCH = Path(find_spec("torch").submodule_search_locations[0])
# Each folder there has the name of a processor and holds a torch for it; `make torch-aarch64` fills one.
FOREIGN_TORCHES = Path(__file__).resolve().parents[2] / "out/torch"


@dataclass(frozen=True)
class Machine:
    """Linux on one kind of processor; `compiler` makes code for it, and `torch` is a package built for it."""

    processor: str
    compiler: tuple[str, ...]
    torch: Path

    @property
    def name(self) -> str:
        """The machine's name in the names of variants, such as "x86_64-linux"."""
        return f"{self.processor}-linux"

    @property
    def is_here(self) -> bool:
        """Whether this machine can run what is made for that one."""
        return self.processor == platform.machine()

    @property
    def torch_version(self) -> str:
        """The version of `torch`. `BuildError` if it is not installed there."""
        distribution = next(iter(distributions(name="torch", path=[str(self.torch.parent)])), None)
        if distribution is None:
            raise BuildError(
                f"there is no torch for {self.processor} in {self.torch.parent}: make torch-{self.processor}"
            )
        return distribution.version

    def program(self, name: str) -> str:
        """Return the path of the compiler's nm, strip or the like, which knows this machine's libraries."""
        return run([*self.compiler, f"-print-prog-name={name}"]).strip()

    def library(self, name: str) -> Path:
        """Return the file that the compiler links as `name`; it does not exist if the compiler has none."""
        return Path(run([*self.compiler, f"-print-file-name={name}"]).strip())

    def takes(self, flag: str) -> bool:
        """Whether the compiler knows `flag`."""
        try:
            run([*self.compiler, "-Werror", flag, "-fsyntax-only", "-x", "c++", os.devnull])
        except BuildError:
            return False
        return True


def find_machine(processor: str | None = None) -> Machine:
    """Return the machine to build for, by default this one, with the compiler that the variable CXX names.

    Without CXX it is g++, or Debian's cross compiler for another processor. `BuildError` if this is not Linux, if
    nothing is built for the processor, or if the compiler is not installed or makes code for another one.
    """
    here = platform.machine()
    if sys.platform != "linux" or (processor or here) not in PROCESSORS:
        made, this = " and ".join(PROCESSORS), f"{processor or here}-{sys.platform}"
        raise BuildError(f"this driver makes code for Linux on {made}, not for {this}: use kernel-builder")
    processor = processor or here
    usual = "g++" if processor == here else f"{processor}-linux-gnu-g++"
    compiler = tuple(shlex.split(os.environ.get("CXX") or usual))
    target = run([*compiler, "-dumpmachine"]).strip()
    if target.split("-")[0] != processor:
        raise BuildError(f"{shlex.join(compiler)} makes code for {target}, not for {processor}: set CXX")
    return Machine(processor, compiler, TORCH if processor == here else FOREIGN_TORCHES / processor / "torch")
