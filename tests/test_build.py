"""What a variant holds, what stops a build before it starts, and that a failed one changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import kernels
import pytest
from toy_kernel import commit

build = pytest.importorskip("build", reason="tools/ is not here")
compilers = pytest.importorskip("compilers")
from commands import BuildError  # noqa: E402
from generated_sources import ops_py  # noqa: E402
from variant_metadata import BUILDER_VERSION, read_metadata  # noqa: E402

CPU = "torch-stable-abi211-cpu-x86_64-linux"


def contents(variant: Path) -> dict[str, bytes]:
    return {str(file.relative_to(variant)): file.read_bytes() for file in variant.rglob("*") if file.is_file()}
