"""Build every variant that this machine can build into build/, without Nix; the Hub's builder makes the others.

    python -m tools.build.variants [--backend cpu] [--backend cuda] [--backend noarch] [--output DIR]

"noarch" stands for the variants without a library, torch-cpu, torch-cuda and torch-rocm, which every machine can build.
Variants are compiled, checked and described in a work folder. When all are done they replace the old ones,
together with the card, so a failed build changes nothing. Two builds of one commit with the same compilers and torch
have the same bytes, wherever the repository is (`rebuild.py` shows it).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
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
from tools.build.compilers import HOST, Cuda, Job, check_headers, check_paths, compile_library, find_cuda, strip
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
    """A finished variant; `glibc` and `glibcxx` are the newest symbol versions that it needs, "-" without a library."""

    path: Path
    ops: str
    seconds: float
    glibc: str
    glibcxx: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def build_variants(root: Path, backends: Sequence[str] | None, output: Path) -> list[Built]:
    """Build variants of the repository `root` into `output`, with its card.

    `backends` are backends of build.toml, one compiled variant for each, and "noarch" for all that have no library.
    None stands for everything that can be built here.

    Raises `BuildError` before compiling if build.toml, the tree or the machine does not allow it, and with the
    compiler's message if compiling fails; what was in `output` then stays, and also if moving files there fails.
    """
    root, output = root.resolve(), output.resolve()
    tables = read_build(root)
    if backends is None:
        unavailable = unavailable_backends(tables)
        backends = [*(name for name in tables["general"]["backends"] if name not in unavailable), NOARCH]
    jobs = [job for backend in dict.fromkeys(backends) for job in plans(root, tables, backend, output / WORK)]
    page = fill_card(root, tables, jobs[0].recipe.package)
    with work_folder(output) as work:
        built = [build_variant(job) for job in jobs]
        (work / "CARD.md").write_text(page)
        put_in_place([*(variant.path for variant in built), work / "CARD.md"], output)
    return [replace(variant, path=output / variant.path.name) for variant in built]


def unavailable_backends(tables: dict) -> dict[str, str]:
    """Return the backends of build.toml that cannot be built here, each with the reason."""
    reasons = {}
    for backend in tables["general"]["backends"]:
        try:
            toolkit(backend)
        except BuildError as error:
            reasons[backend] = str(error)
    return reasons


def toolkit(backend: str) -> Cuda | None:
    """Return what `backend` needs besides a C++ compiler; `BuildError` if it cannot be built on this machine."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        machine = f"{platform.machine()}-{sys.platform}"
        raise BuildError(f"this driver makes {HOST} only, this is {machine}: use kernel-builder")
    if backend not in BACKENDS:
        raise BuildError(f"this driver builds {' and '.join(BACKENDS)}, not {backend}: use kernel-builder")
    return find_cuda() if backend == "cuda" else None


def plans(root: Path, tables: dict, backend: str, work: Path) -> list[Job]:
    """Return the jobs for `backend`: one that compiles, or all of "noarch". Raises `BuildError` as `plan` does."""
    if backend == NOARCH:
        return [plan_noarch(root, tables, name, work) for name in NOARCH_BACKENDS]
    return [plan(root, tables, backend, work)]


def plan(root: Path, tables: dict, backend: str, work: Path) -> Job:
    """Return the job for `backend`. Raises `BuildError` if the files or the machine do not allow it."""
    cuda = toolkit(backend)
    recipe = read_recipe(root, tables, backend)
    check_headers(recipe)
    job = Job(root, recipe, read_revision(root, recipe.inputs), work / backend, cuda)
    check_paths(job)
    return job


def build_variant(job: Job) -> Built:
    """Assemble and describe one variant in the work folder, after compiling and checking its library if it has one."""
    start = time.perf_counter()
    library = None if isinstance(job, NoarchJob) else build_library(job)
    variant = job.work / job.variant_name
    assemble(variant, job, library)
    write_metadata(variant, job.recipe, job.ops, job.revision)
    versions = [newest_version(library, family) if library else "-" for family in ("GLIBC", "GLIBCXX")]
    return Built(variant, job.ops, time.perf_counter() - start, *versions)


def build_library(job: Job) -> Path:
    """Return the stripped library of a variant; `BuildError` says what would keep it from being loaded elsewhere."""
    library = compile_library(job)
    problems = violations(library, job.recipe)
    if problems:
        raise BuildError("\n".join([f"{library.name} would not load everywhere it has to:", *problems]))
    strip(library)
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
    """Return the table at the end of a build, with two lines per row to fit into 80 columns."""
    checks = f"Python {PYTHON_ABI} ABI, {MANYLINUX}, torch stable ABI, linked libraries, metadata"
    table = Table("variant, op namespace", caption=f"Checked: {checks}")
    for heading in ("KiB", "seconds", "GLIBC", "GLIBCXX"):
        table.add_column(heading, justify="right")
    for variant in built:
        measured = f"{variant.size / 1024:.0f}", f"{variant.seconds:.1f}", variant.glibc, variant.glibcxx
        table.add_row(f"{variant.path.name}\n{variant.ops}", *measured)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the variants that this machine can build.")
    choices = (*BACKENDS, NOARCH)
    parser.add_argument("--backend", action="append", choices=choices, help="may be repeated; default: all possible")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="default: %(default)s")
    arguments = parser.parse_args()
    console = Console()
    try:
        if arguments.backend is None:
            for backend, reason in unavailable_backends(read_build(ROOT)).items():
                console.print(f"{backend} is skipped: {reason}", markup=False)
        built = build_variants(ROOT, arguments.backend, arguments.output)
    except (BuildError, OSError) as error:
        print(f"tools.build.variants: {error}", file=sys.stderr)
        return 1
    console.print(summary(built))
    return 0


if __name__ == "__main__":
    sys.exit(main())
