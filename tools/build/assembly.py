"""Assembles a variant from the Python package and, if it is a compiled one, a library."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.build.compilers import Job
from tools.build.generated_sources import ops_py


def assemble(variant: Path, job: Job, library: Path | None) -> None:
    """Fill the new folder `variant` with the Python package, the library if there is one, and `_ops.py`."""
    for file in job.recipe.package_files:
        (variant / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(job.root / job.recipe.package / file, variant / file)
    if library is not None:
        shutil.copyfile(library, variant / library.name)
    (variant / "_ops.py").write_text(ops_py(job.ops, has_library=library is not None))
