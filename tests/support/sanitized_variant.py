"""The variant of the CPU compiled with a sanitizer of GCC, and runs of pytest in which that watches the operations."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.support.rank_pool import REPO_ID
from tools.build import compilers, variants
from tools.build.assembly import assemble
from tools.build.machines import Machine
from tools.build.recipe import read_build
from tools.build.variant_metadata import write_metadata

ROOT = Path(__file__).resolve().parents[2]


class Sanitizer(NamedTuple):
    """Flags of the compiler, what it must find before all other libraries, and what it is told in the environment.

    `selection` are arguments of pytest that leave out tests which it cannot watch.
    """

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    variables: dict[str, str]
    selection: tuple[str, ...] = ()


# More optimization takes three times as long to compile. The last flag fuses products with sums, which laws of float32
# products ask for.
_FLAGS = ("-g1", "-O1", "-fexpensive-optimizations")
# Python leaks by design.
_MEMORY = Sanitizer(
    ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all", *_FLAGS),
    ("libasan.so", "libstdc++.so"),
    {"ASAN_OPTIONS": "detect_leaks=0"},
)
# Without clones, because what chooses one runs before the sanitizer does. Torch is compiled without it: what runs in a
# region of torch's threads is left out, since the sanitizer does not see where one ends.
_THREADS = Sanitizer(
    ("-fsanitize=thread", "-DOPTIMIZER_CLONES=", *_FLAGS),
    ("libtsan.so", "libstdc++.so"),
    {"TSAN_OPTIONS": f"ignore_noninstrumented_modules=1 suppressions={Path(__file__).with_name('torch_regions.txt')}"},
    ("-k", "not fork"),  # a forked process cannot start threads under it
)
SANITIZERS = {"memory": _MEMORY, "threads": _THREADS}
# Of the linker: it refuses a library in which one name has two definitions.
ONE_DEFINITION = Sanitizer(("-flto=auto", "-Wodr", "-Werror=odr", "-O1"), (), {})


def build_sanitized_variant(tree: Path, folder: Path, sanitizer: Sanitizer) -> tuple[Path, Machine]:
    """Return the variant of `tree`, the repository or a copy of it, and the machine that it is compiled for."""
    job = dataclasses.replace(variants.plan(ROOT, read_build(ROOT), "cpu", folder / "work"), root=tree)
    with ExitStack() as stack:
        for name in ("compile_line", "link_line"):
            line = partial(extended, getattr(compilers, name), sanitizer.flags)
            stack.enter_context(mock.patch.object(compilers, name, line))
        library = compilers.compile_library(job)
    variant = folder / "build" / job.variant_name
    assemble(variant, job, library)
    write_metadata(variant, job.recipe, job.ops, job.revision)
    return variant, job.machine


def extended(line: Callable[..., list], flags: Sequence[str], *arguments) -> list:
    """Return a command with flags at its end, which count more than others before them."""
    return [*line(*arguments), *flags]


def run_sanitized(variant: Path, machine: Machine, sanitizer: Sanitizer, arguments: Sequence[str]):
    """Return the finished process of a pytest that tests `variant`. It has died if the sanitizer found something."""
    preloaded = " ".join(str(machine.library(name)) for name in sanitizer.libraries)
    loaded = {"LD_PRELOAD": preloaded, "LOCAL_KERNELS": f"{REPO_ID}={variant.parent}"}
    variables = {**loaded, "PYTHONMALLOC": "malloc", **sanitizer.variables}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--capture=no",
        "-p",
        "no:cacheprovider",
        *sanitizer.selection,
        *arguments,
    ]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
