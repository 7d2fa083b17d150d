"""The second source tree as the Hub's builder treats it: it copies the package, names the operators and the commit.

What it writes besides is as in no-arch.nix and gen-flake-outputs.nix of huggingface/kernels at 8ac69fc.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import tomllib

from tests.support.toy_kernel import git
from tools.build.generated_sources import ops_py
from tools.build.recipe import Recipe
from tools.build.source_tree import Revision
from tools.build.variant_metadata import write_metadata


def build_noarch_tree(tree: Path, output: Path) -> list[Path]:
    """Build the variants of `tree`, which is a git repository, into `output`, and return their folders."""
    tables = tomllib.loads((tree / "build.toml").read_text())
    commit, hashed = git(tree, "rev-parse", "HEAD", "HEAD^{tree}").split()
    dirty = bool(git(tree, "status", "--porcelain"))
    revision = Revision(commit, hashed, dirty)
    built = []
    for backend in tables["general"]["backends"]:
        recipe = recipe_of(tables["general"], backend)
        variant = shutil.copytree(tree / "torch-ext" / recipe.name, output / f"torch-{backend}")
        # Nix names operators by the commit, where kernel-builder alone takes the tree.
        ops = f"_{recipe.name}_{backend}_{commit[:7]}{'_dirty' if dirty else ''}"
        (variant / "_ops.py").write_text(ops_py(ops, has_library=False))
        write_metadata(variant, recipe, ops, revision)
        built.append(variant)
    return built


def recipe_of(general: dict, backend: str) -> Recipe:
    nothing = {"torch_abi": "", "python_depends": (), "archs": (), "archs_of": {}, "needs_cutlass": False}
    return Recipe(
        **{key: general[key] for key in ("name", "version", "license")},
        **nothing,
        backend=backend,
        links={key: general[key] for key in ("upstream", "source") if key in general},
        sources=(),
        package=Path(),
        package_files=(),
    )
