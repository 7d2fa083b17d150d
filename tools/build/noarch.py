"""Noarch variants: the Python package alone, which the Hub's loader takes where no compiled variant fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tools.build.compilers import Job
from tools.build.recipe import Recipe, read_recipe
from tools.build.source_tree import read_revision

# What the loader calls the backends of torch that the package runs on without a library.
NOARCH_BACKENDS = ("cpu", "cuda", "rocm", "metal", "xpu")


class NoarchJob(Job):
    """A variant for which nothing is compiled. Its name has no platform and no version, since it fits all of them."""

    @property
    def variant_name(self) -> str:
        return f"torch-{self.recipe.backend}"


def plan_noarch(root: Path, tables: dict, backend: str, work: Path) -> NoarchJob:
    """Return the job for the noarch variant of `backend`. Raises `BuildError` if the files do not allow it."""
    recipe = noarch_recipe(root, tables, backend)
    return NoarchJob(root, recipe, read_revision(root, recipe.inputs), work / f"torch-{backend}", cuda=None)


def noarch_recipe(root: Path, tables: dict, backend: str) -> Recipe:
    """Return the recipe of the package without its sources, for any backend; no device is too old or too new for it."""
    compiled = read_recipe(root, tables, tables["general"]["backends"][0])
    return replace(compiled, backend=backend, archs=(), archs_of={}, needs_cutlass=False, sources=())
