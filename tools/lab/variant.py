"""The variant that the lab works with: the library of a build, or one built here, with the tree's Python files."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.built_kernel import find_variant, is_compiled, read_metadata
from tools.build.assembly import assemble
from tools.build.commands import BuildError, git
from tools.build.compilers import Job, check_headers, compile_library, find_cuda
from tools.build.machines import find_machine
from tools.build.recipe import Recipe, read_recipe, read_tables
from tools.build.source_tree import Revision

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch-ext/optimizer"
COMPILED = ("optimizer_common", "optimizer_cpu", "optimizer_cuda", "torch-ext/torch_binding.cpp", "build.toml")
PYTHON = (".py", ".json")


def prepare(build: Path, work: Path, backend: str) -> Path:
    """Return a new folder in `work` that holds one variant for `backend`. `build` is not changed.

    The library comes from `build` if it has one and no compiled source has changed since its commit, or if git cannot
    tell. Otherwise it is built.
    Raises `BuildError` if that fails.
    """
    source = usable(build, backend)
    if source is None:
        print(f"{build} has no {backend} variant of these sources: building one")
        source = build_here(work / "build", backend)
    target = work / "variants" / source.name
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    if overlay(target):
        metadata = read_metadata(target)
        metadata["provenance"]["kernel"]["dirty"] = True
        (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return target.parent


def usable(build: Path, backend: str) -> Path | None:
    """Return the compiled variant in `build` for `backend`, None if there is none or its sources have changed."""
    try:
        variant = find_variant(build)
    except FileNotFoundError:
        return None
    metadata = read_metadata(variant)
    if metadata["backend"]["type"] != backend or not is_compiled(variant):
        return None
    built = metadata["provenance"]["kernel"]
    try:
        changed = git(ROOT, "diff", "--name-only", built["commit"], "--", *COMPILED).split()
    except BuildError:  # the sources are a copy without git, or without that commit
        return variant
    if built["dirty"]:  # the build had uncommitted changes
        made = (variant / "metadata.json").stat().st_mtime
        changed = [file for file in changed if not (ROOT / file).exists() or (ROOT / file).stat().st_mtime > made]
    return None if changed else variant


def build_here(output: Path, backend: str) -> Path:
    """Return a variant built into `output`, in the form that is published if this machine has the tools for that."""
    shutil.rmtree(output, ignore_errors=True)
    if not all(importable(name) for name in ("kernels", "kernel_abi_check")) or not (ROOT / ".git").exists():
        return build_for_this_gpu(output, backend)
    # Imported here, because it needs the Hub's package.
    from tools.build.variants import build_variants

    (built,) = build_variants(ROOT, [backend], output)
    return built.path


def importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # the name belongs to no module
        return False


def build_for_this_gpu(output: Path, backend: str) -> Path:
    """Return an unchecked variant, which must not be published. It needs neither git nor the Hub's package."""
    recipe = read_recipe(ROOT, read_tables(ROOT), backend)
    machine = find_machine()
    check_headers(recipe, machine)
    cuda = backend == "cuda"
    recipe = recipe.for_device("{}.{}".format(*torch.cuda.get_device_capability())) if cuda else recipe
    revision = Revision(commit_here(), digest_of(recipe), dirty=True)
    job = Job(ROOT, recipe, revision, output.resolve() / ".work", find_cuda() if cuda else None, machine)
    library = compile_library(job)
    variant = output / job.variant_name
    assemble(variant, job, library)
    made_from = {"commit": revision.commit, "dirty": revision.dirty}
    metadata = {"id": job.ops, "backend": {"type": backend}, "provenance": {"kernel": made_from}}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def commit_here() -> str:
    try:
        return git(ROOT, "rev-parse", "HEAD").strip()
    except BuildError:
        return "unknown"


def digest_of(recipe: Recipe) -> str:
    """Return a digest of everything that goes into a variant. The operators are named after it."""
    return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in recipe.inputs)).hexdigest()


def overlay(variant: Path) -> bool:
    """Copy the tree's Python files and configurations into a variant; return whether its Python files changed."""
    sources = {file.relative_to(PACKAGE): file for file in PACKAGE.rglob("*") if belongs(file)}
    copies = {file.relative_to(variant): file for file in variant.rglob("*") if belongs(file)}
    changed = False
    for gone in copies.keys() - sources.keys():
        copies[gone].unlink()
        changed = changed or gone.suffix == ".py"
    for name, file in sources.items():
        target = variant / name
        if not target.exists() or target.read_bytes() != file.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            changed = changed or file.suffix == ".py"
    return changed


def belongs(file: Path) -> bool:
    is_source = file.suffix in PYTHON and file.name not in ("_ops.py", "metadata.json")
    return is_source and "__pycache__" not in file.parts


def digest(variants: Path) -> str:
    """Return a digest of the variant in a folder, except for its configurations, which the lab itself writes."""
    total = hashlib.sha256()
    for file in sorted(variants.rglob("*")):
        if file.is_file() and "configs" not in file.parts and "__pycache__" not in file.parts:
            total.update(f"{file.relative_to(variants)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]
