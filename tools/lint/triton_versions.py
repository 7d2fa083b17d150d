"""Runs tools.lint.kernels with another version of triton, which is installed for that run only."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.build.commands import run

ROOT = Path(__file__).resolve().parents[2]
# The oldest and the newest that users of this torch have, and the one that its CUDA builds require.
VERSIONS = ("3.6.0", "3.7.1", "3.9.0")


def lint_under(version: str, arguments: Sequence[str | Path]) -> int:
    """Compile with triton `version`, ahead of the installed one; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}"])
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tools.lint.kernels", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
