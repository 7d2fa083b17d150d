"""Build one variant for this machine alone, where neither the Hub's package nor git is.

    python -m tools.lab.bare_build --backend cuda --capability 9.0 --output DIR

It is compiled by the lines that `tools.build.variants` uses, for one GPU, and checked for nothing: it is not to be
published.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

if find_spec("kernels") is None:
    # The recipe lets the Hub's parser judge build.toml, as it does wherever a release is made.
    parser = sys.modules["kernels._rust"] = ModuleType("kernels._rust")
    parser.Build = SimpleNamespace(open=lambda root: None)
    parser.KernelName = lambda name: SimpleNamespace(python_name=name.replace("-", "_"))
    sys.modules["kernels"] = ModuleType("kernels")

from tools.build.commands import BuildError
from tools.build.compilers import Job, check_headers, compile_library, find_cuda
from tools.build.generated_sources import ops_py
from tools.build.recipe import Recipe, read_build, read_recipe
from tools.build.source_tree import Revision

ROOT = Path(__file__).resolve().parent.parent.parent


def build(backend: str, capability: str | None, output: Path) -> Path:
    """Return the folder of the new variant in `output`; `BuildError` with the compiler's message."""
    recipe = read_recipe(ROOT, read_build(ROOT), backend)
    check_headers(recipe)
    recipe = replace(recipe, archs=(capability,) if backend == "cuda" else ())
    revision = Revision("unknown", digest(recipe), dirty=True)
    job = Job(ROOT, recipe, revision, output.resolve() / ".work", find_cuda() if backend == "cuda" else None)
    library = compile_library(job)
    variant = output / job.variant_name
    for file in recipe.package_files:
        (variant / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / recipe.package / file, variant / file)
    shutil.copyfile(library, variant / library.name)
    (variant / "_ops.py").write_text(ops_py(job.ops))
    made_from = {"commit": revision.commit, "dirty": revision.dirty}
    metadata = {"id": job.ops, "backend": {"type": backend}, "provenance": {"kernel": made_from}}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def digest(recipe: Recipe) -> str:
    """Return a digest of all that goes into a variant, which names its operators."""
    return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in recipe.inputs)).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build one variant for this machine alone.")
    parser.add_argument("--backend", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--capability", help="of the GPU, such as 9.0; needed for cuda")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        print(build(arguments.backend, arguments.capability, arguments.output))
    except BuildError as error:
        print(f"tools.lab.bare_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
