"""The suite on other stacks than the one installed: the oldest torch that build.toml names, the newest, every Triton.

Each is installed into an environment of its own, from the registry, which takes minutes: `make test-stacks`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.build.commands import BuildError, run
from tools.build.recipe import read_tables

# With the Triton that CUDA builds of each ask for.
STACKS = {"2.11.0": "3.6.0", "2.15.0": "3.9.0"}
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
PREFERRED_PYTHON = "python3.12"  # of machines with a GPU
SUITE = ("tests/kernels", "tests/math", "tests/muon")
LAWS = ("test_tiles", "test_symmetric_gemm_laws", "test_small_polar_laws")


def preferred_python() -> str:
    """Return the Python of the target stack where it is here, else this one."""
    try:
        run([PREFERRED_PYTHON, "-c", "import ctypes, ssl"])
    except BuildError:
        return sys.executable
    return PREFERRED_PYTHON


def development_requirements(repository: Path) -> list[str]:
    """Return what tests need besides torch and triton, which requirements/run.txt names."""
    files = (repository / "requirements" / name for name in ("develop.txt", "gpu.txt"))
    lines = (line.strip() for file in files for line in file.read_text().splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


def assert_passes(python: str | Path, repository: Path, *arguments: str, folder: Path | None = None) -> None:
    """Run pytest; packages in `folder` come before those of the environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_KERNELS", "PYTHONPATH")}
    environment |= {"PYTHONPATH": str(folder)} if folder else {}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_oldest_stack_is_that_of_the_recipe(repository):
    oldest = read_tables(repository)["torch"]["stable-abi"]
    assert {".".join(min(STACKS).split(".")[:2])} == set(oldest.values())


@pytest.mark.slow
@pytest.mark.stacks
@pytest.mark.parametrize("torch", STACKS)
def test_the_suite_passes_with_torch(repository, tmp_path, torch):
    """The variant is compiled with this torch's headers, and loaded by it."""
    run([preferred_python(), "-m", "venv", tmp_path / "stack"])
    python = tmp_path / "stack/bin/python"
    packages = [f"torch=={torch}", f"triton=={STACKS[torch]}", *development_requirements(repository)]
    run([python, "-m", "pip", "install", "--quiet", *packages])
    # The registry's torch is one for CUDA, for which the CUDA variant is built: that takes CUTLASS's headers.
    headers = repository / "requirements/cuda.txt"
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", headers])
    assert_passes(python, repository, "-m", "not slow", *SUITE)


@pytest.mark.slow
@pytest.mark.stacks
@pytest.mark.parametrize("triton", TRITONS)
def test_the_laws_hold_in_the_interpreter_of_triton(repository, tmp_path, triton):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    run([*command, f"triton=={triton}"])
    laws = [f"tests/kernels/{name}.py" for name in LAWS]
    assert_passes(sys.executable, repository, "-k", "interpreter", *laws, folder=tmp_path)
