"""The suite on other stacks than the one installed: the oldest torch that build.toml names, the newest, every Triton.

Older ones that README promises have the variants without a library, and the tests of the Hub's builder. Each stack is
installed into an environment of its own, from the registry, which takes minutes: `make test-stacks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builders_copy import PYPROJECT, copy_as_builder, packages_of_flake
from tools.build.commands import BuildError, run
from tools.build.recipe import read_tables
from tools.build.variants import build_variants

# With the Triton that CUDA builds of each ask for.
STACKS = {"2.11.0": "3.6.0", "2.15.0": "3.9.0"}
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
PREFERRED_PYTHON = "3.12"  # of machines with a GPU
# What runs with the torch of its user: the package, and the examples. The other folders are of what runs with the torch
# of requirements/run.txt alone: of builds and releases (delivery; the variant is compiled and loaded by this torch all
# the same), of measurements and pages (benchmarks, lab, reports), and of libraries that ask for a torch (integrations).
SUITE = ("kernels", "math", "muon", "rules", "wrappers", "tuning", "ranks", "examples")
LAWS = ("test_tiles", "test_symmetric_gemm_laws", "test_small_polar_laws")
# The oldest that README names. PyPI's build of this torch is for CUDA 12, for which nothing is compiled.
PROMISED_PYTHON, PROMISED_TORCH = "3.10", "2.10"
CLIENT = """
import json
import kernels, torch
from tests.support.small_training import trained_on_cpu

kernel = kernels.get_kernel("org/optimizer", version=0, trust_remote_code=True)
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, **trained_on_cpu(kernel)}))
"""


def python_of(version: str) -> str:
    """Return the Python of a version, such as "3.12", where it is on the PATH or among pyenv's; else this one."""
    asked = [f"python{version}", "-c", "import ctypes, ssl, sys; print(sys.executable)"]
    try:
        return run(asked, environment={**os.environ, "PYENV_VERSION": version}).strip()
    except BuildError:
        return sys.executable


def install(folder: Path, version: str, packages: list[str]) -> Path:
    """Install packages into a new environment in `folder`, of `python_of` this version, and return its Python."""
    run([python_of(version), "-m", "venv", folder])
    python = folder / "bin/python"
    run([python, "-m", "pip", "install", "--quiet", *packages])
    return python


def development_requirements(repository: Path) -> list[str]:
    """Return what tests need besides torch and triton, which requirements/run.txt names."""
    files = (repository / "requirements" / name for name in ("develop.txt", "gpu.txt"))
    lines = (line.strip() for file in files for line in file.read_text().splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


def environment_with(**variables: str) -> dict[str, str]:
    """Return this process's environment with `variables`, and without packages and kernels that are not installed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("LOCAL_KERNELS", "PYTHONPATH")}
    return {**inherited, **variables}


def assert_passes(python: str | Path, folder: Path, *arguments: str, **variables: str) -> None:
    """Run pytest in a folder."""
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = environment_with(**variables)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_oldest_stack_is_that_of_the_recipe(repository):
    oldest = read_tables(repository)["torch"]["stable-abi"]
    assert {".".join(min(STACKS).split(".")[:2])} == set(oldest.values())


def test_the_oldest_python_and_torch_are_those_of_the_readme(repository):
    promise = f"needs Python {PROMISED_PYTHON} and torch {PROMISED_TORCH}, or newer"
    assert promise in (repository / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.stacks
@pytest.mark.parametrize("torch", STACKS)
def test_the_suite_passes_with_torch(repository, tmp_path, torch):
    """The variant is compiled with this torch's headers, and loaded by it."""
    packages = [f"torch=={torch}", f"triton=={STACKS[torch]}", *development_requirements(repository)]
    python = install(tmp_path / "stack", PREFERRED_PYTHON, packages)
    # The registry's torch is one for CUDA, for which the CUDA variant is built: that takes CUTLASS's headers.
    headers = repository / "requirements/cuda.txt"
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", headers])
    assert_passes(python, repository, "-m", "not slow and not integrations", *(f"tests/{folder}" for folder in SUITE))


@pytest.fixture(scope="module")
def promised(repository, tmp_path_factory):
    """A Python with the oldest torch, a folder with variants without a library, and a copy of the builder's tests."""
    folder = tmp_path_factory.mktemp("promised")
    (loader,) = (line for line in development_requirements(repository) if line.startswith("kernels=="))
    packages = [f"torch=={PROMISED_TORCH}.0", loader, "pytest", *packages_of_flake(repository)]
    python = install(folder / "stack", PROMISED_PYTHON, packages)
    build_variants(repository, ["noarch"], folder / "build")
    copy = copy_as_builder(repository, folder / "copy")
    (copy / "pyproject.toml").write_text(PYPROJECT)
    return python, folder / "build", copy


@pytest.mark.slow
@pytest.mark.stacks
def test_the_oldest_torch_trains_by_the_variant_that_it_loads(promised):
    python, build, copy = promised
    environment = environment_with(LOCAL_KERNELS=f"org/optimizer={build}")
    seen = json.loads(run([python, "-c", CLIENT], cwd=copy, environment=environment).splitlines()[-1])
    assert seen["torch"].startswith(f"{PROMISED_TORCH}.")
    assert seen["variant"] == ("torch-cuda" if seen["cuda"] else "torch-cpu")
    assert seen["losses"][-1] < 0.8 * seen["losses"][0]


@pytest.mark.slow
@pytest.mark.stacks
def test_the_oldest_torch_passes_the_tests_of_the_builder(promised):
    python, build, copy = promised
    assert_passes(python, copy, "-m", "kernels_ci", "tests", LOCAL_KERNELS=f"org/optimizer={build}")


@pytest.mark.slow
@pytest.mark.stacks
@pytest.mark.parametrize("triton", TRITONS)
def test_the_laws_hold_in_the_interpreter_of_triton(repository, tmp_path, triton):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    run([*command, f"triton=={triton}"])
    laws = [f"tests/kernels/{name}.py" for name in LAWS]
    assert_passes(sys.executable, repository, "-k", "interpreter", *laws, PYTHONPATH=str(tmp_path))
