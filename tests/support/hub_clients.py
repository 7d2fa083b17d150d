"""Clients of a Hub in processes of their own, because they read their environment when they are imported."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.hub.client_environment import client_environment

ROOT = Path(__file__).resolve().parents[2]

INIT = """
import torch
from ._ops import add_op_namespace_prefix, ops

__all__ = ["scale"]


@torch.library.custom_op(add_op_namespace_prefix("scale"), mutates_args=())
def _scale(x: torch.Tensor) -> torch.Tensor:
    return {factor} * x


def scale(x):
    return ops.scale(x)
"""
OPS = """
import torch
ops = torch.ops.{ops}


def add_op_namespace_prefix(op_name: str):
    return f"{ops}::{{op_name}}"
"""


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a client that may import the tools, too."""
    return {**client_environment(endpoint, home), "PYTHONPATH": str(ROOT), **more}


def run_client(code: str, arguments: list[object], variables: dict[str, str]) -> Any:
    """Run Python code and return what it prints on its last line, which must be JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_tool(tree: Path, tool: str, *arguments: object, variables: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a program of a tree by the name of its module, and return how it ended."""
    command = [sys.executable, "-m", tool, *map(str, arguments)]
    return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, timeout=300, check=False)


def write_variant(variant: Path, unique_id: str, factor: int, **metadata: Any) -> Path:
    """Write a variant in plain Python, whose `scale` multiplies by `factor`; `metadata` goes over its metadata.json."""
    backend = metadata.get("backend", {"type": "cpu"})
    ops = f"_tiny_{backend['type']}_{unique_id}"
    variant.mkdir(parents=True, exist_ok=True)
    (variant / "__init__.py").write_text(INIT.format(factor=factor))
    (variant / "_ops.py").write_text(OPS.format(ops=ops))
    content = {
        "name": "tiny",
        "id": ops,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
        **metadata,
    }
    (variant / "metadata.json").write_text(json.dumps(content))
    digest_again(variant)
    return variant


def digest_again(variant: Path) -> None:
    """Write the digest of the files as they are now into metadata.json, as a builder would, and as a forger would."""
    files = {
        file.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in sorted(variant.rglob("*"))
        if file.is_file() and file.name != "metadata.json" and file.suffix != ".pyc"
    }
    metadata = json.loads((variant / "metadata.json").read_text())
    digest = {"algorithm": "sha256", "files": files}
    (variant / "metadata.json").write_text(json.dumps({**metadata, "digest": digest}, indent=2))
