"""Build every variant that this machine can build into build/, without Nix; the Hub's builder makes the others.

    python -m tools.build.variants [--backend cpu|cuda|noarch] [--machine aarch64] [--output DIR]

"noarch" stands for the variants without a library, such as torch-cpu and torch-metal, which every machine can build.
Variants are compiled, checked, described and imported in a work folder. When all are done they replace the old ones,
together with the card, so a failed build changes nothing. Two builds of one commit with the same compilers and torch
have the same bytes, wherever the repository is (`rebuild.py` shows it).

The variable CXX names the compiler; without it that is g++, and for another machine Debian's cross compiler. Clang can
be named, too. Its variants are right, but take several times as long for momentum and descent: it makes no clones of
functions for levels of x86-64. nvcc has a host compiler of its own, which its variable NVCC_CCBIN names; for another
machine it calls what CXX names.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.build.abi_check import MANYLINUX, PYTHON_ABI, newest_version, violations
from tools.build.assembly import assemble
from tools.build.card import fill_card
from tools.build.commands import BuildError
from tools.build.compilers import Cuda, Job, check_cudart, check_headers, check_paths, compile_library, find_cuda, strip
from tools.build.loading import load
from tools.build.machines import PROCESSORS, Machine, find_machine
from tools.build.noarch import NOARCH_BACKENDS, NoarchJob, plan_noarch
from tools.build.recipe import read_build, read_recipe
from tools.build.source_tree import read_revision
from tools.build.variant_metadata import write_metadata

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("cpu", "cuda")
NOARCH = "noarch"
WORK = ".work"


@dataclass(frozen=True)
class Built:
    """A finished variant; `glibc` and `glibcxx` are the newest symbol versions that it needs, "-" without a library.

    `loaded` says which torch imported it, or why none here can.
    """

    path: Path
    ops: str
    loaded: str
    seconds: float
    glibc: str
    glibcxx: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def build_variants(
    root: Path, backends: Sequence[str] | None, output: Path, processor: str | None = None
) -> list[Built]:
    """Build variants of the repository `root` into `output`, with its card.

    `backends` are backends of build.toml, one compiled variant for each, and "noarch" for all that have no library.
    None stands for everything that can be built here. What is compiled is for Linux on `processor`, by default this
    machine's.

    Raises `BuildError` before compiling if build.toml, the tree or the machine does not allow it, and with the
    compiler's message if compiling fails; what was in `output` then stays, and also if moving files there fails.
    """
    root, output = root.resolve(), output.resolve()
    tables = read_build(root)
    if backends is None:
        unavailable = unavailable_backends(tables, processor)
        backends = [*(name for name in tables["general"]["backends"] if name not in unavailable), NOARCH]
    work = output / WORK
    jobs = [job for backend in dict.fromkeys(backends) for job in plans(root, tables, backend, work, processor)]
    page = fill_card(root, tables, jobs[0].recipe.package)
    with work_folder(output) as work:
        built = [build_variant(job) for job in jobs]
        (work / "CARD.md").write_text(page)
        put_in_place([*(variant.path for variant in built), work / "CARD.md"], output)
    return [replace(variant, path=output / variant.path.name) for variant in built]


def unavailable_backends(tables: dict, processor: str | None) -> dict[str, str]:
    """Return the backends of build.toml that cannot be built here for `processor`, each with the reason."""
    reasons = {}
    for backend in tables["general"]["backends"]:
        try:
            toolkit(backend, find_machine(processor))
        except BuildError as error:
            reasons[backend] = str(error)
    return reasons


def toolkit(backend: str, machine: Machine) -> Cuda | None:
    """Return what `backend` needs besides a C++ compiler; `BuildError` if it cannot be built here for `machine`."""
    if backend not in BACKENDS:
        raise BuildError(f"this driver builds {' and '.join(BACKENDS)}, not {backend}: use kernel-builder")
    if backend != "cuda":
        return None
    cuda = find_cuda()
    check_cudart(cuda, machine)
    return cuda


def plans(root: Path, tables: dict, backend: str, work: Path, processor: str | None = None) -> list[Job]:
    """Return the jobs for `backend`: one that compiles, or all of "noarch". Raises `BuildError` as `plan` does."""
    if backend == NOARCH:
        return [plan_noarch(root, tables, name, work) for name in NOARCH_BACKENDS]
    return [plan(root, tables, backend, work, find_machine(processor))]


def plan(root: Path, tables: dict, backend: str, work: Path, machine: Machine | None = None) -> Job:
    """Return the job for `backend` and `machine`, by default this one.

    Raises `BuildError` if the files or the machine do not allow it.
    """
    machine = machine or find_machine()
    cuda = toolkit(backend, machine)
    recipe = read_recipe(root, tables, backend)
    check_headers(recipe, machine)
    job = Job(root, recipe, read_revision(root, recipe.inputs), work / backend, cuda, machine)
    check_paths(job)
    return job


def build_variant(job: Job) -> Built:
    """Assemble, describe and import one variant in the work folder, after building its library if it has one."""
    start = time.perf_counter()
    library = None if isinstance(job, NoarchJob) else build_library(job)
    variant = job.work / job.variant_name
    assemble(variant, job, library)
    write_metadata(variant, job.recipe, job.ops, job.revision)
    versions = [newest_version(library, family) if library else "-" for family in ("GLIBC", "GLIBCXX")]
    loaded = load(variant, job)
    return Built(variant, job.ops, loaded, time.perf_counter() - start, *versions)


def build_library(job: Job) -> Path:
    """Return the stripped library of a variant; `BuildError` says what would keep it from being loaded elsewhere."""
    library = compile_library(job)
    problems = violations(library, job)
    if problems:
        raise BuildError("\n".join([f"{library.name} would not load everywhere it has to:", *problems]))
    strip(library, job.machine)
    return library


def put_in_place(made: Sequence[Path], output: Path) -> None:
    """Move files and folders into `output`, replacing those with the same names: all of them, or none and an error.

    A process that has an old file open keeps it.
    """
    moves = []
    for new in made:
        moves += [(output / new.name, new.with_name(f"{new.name}.replaced")), (new, output / new.name)]
    moved = []
    try:
        for source, destination in moves:
            if source.exists():
                source.rename(destination)
                moved.append((source, destination))
    except BaseException:
        for source, destination in reversed(moved):
            destination.rename(source)
        raise


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """Give an empty folder `output/WORK` for the time of a build. A second build into `output` waits until it ends."""
    output.mkdir(parents=True, exist_ok=True)
    work = output / WORK
    lock = os.open(output, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def summary(built: Sequence[Built]) -> Table:
    """Return the table at the end of a build, with three lines per row to fit into 80 columns."""
    checks = f"Python {PYTHON_ABI} ABI, {MANYLINUX}, torch stable ABI, linked libraries and symbols, metadata"
    checks = checks if any(variant.glibc != "-" for variant in built) else "metadata"
    table = Table("variant, op namespace, loaded by", caption=f"Checked: {checks}")
    for heading in ("KiB", "seconds", "GLIBC", "GLIBCXX"):
        table.add_column(heading, justify="right")
    for variant in built:
        measured = f"{variant.size / 1024:.0f}", f"{variant.seconds:.1f}", variant.glibc, variant.glibcxx
        table.add_row(f"{variant.path.name}\n{variant.ops}\n{variant.loaded}", *measured)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the variants that this machine can build.")
    choices = (*BACKENDS, NOARCH)
    parser.add_argument("--backend", action="append", choices=choices, help="may be repeated; default: all possible")
    parser.add_argument("--machine", choices=PROCESSORS, help="default: this machine's")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="default: %(default)s")
    arguments = parser.parse_args()
    console = Console()
    try:
        if arguments.backend is None:
            for backend, reason in unavailable_backends(read_build(ROOT), arguments.machine).items():
                console.print(f"{backend} is skipped: {reason}", markup=False)
        built = build_variants(ROOT, arguments.backend, arguments.output, arguments.machine)
    except (BuildError, OSError) as error:
        print(f"tools.build.variants: {error}", file=sys.stderr)
        return 1
    console.print(summary(built))
    return 0


if __name__ == "__main__":
    sys.exit(main())
