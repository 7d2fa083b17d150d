"""What tests share: the repository, its variant for this torch, built once and loaded as users load it, and a toy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import kernels
import pytest
import torch

from toy_kernel import write_toy_kernel

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/optimizer"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

# The Hub's builder runs tests without the folder tools/.
NEED_TOOLS = (
    "abi_check", "benchmarks", "build", "client_environment", "cuda_variant", "demo", "hub", "hub_files",
    "hub_requests", "hub_store", "instruction_sets", "lint_kernels", "native_backend", "publish",
    "two_revisions", "verify",
)  # fmt: skip
collect_ignore = [f"test_{name}.py" for name in NEED_TOOLS] if not (ROOT / "tools").is_dir() else []


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def native_backend() -> str:
    """The backend whose variant is tested; the loader is asked for it by name."""
    # Imported here, as in `variant`: without tools/ there is a kernel all the same.
    from native_backend import native_backend

    return native_backend()


@pytest.fixture(scope="session")
def variant(repository: Path, native_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from build import build_variants

    (built,) = build_variants(repository, [native_backend], tmp_path_factory.mktemp("build"))
    return built.path


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest):
    """The package as `get_kernel` returns it; where a builder has set LOCAL_KERNELS, the build that it names."""
    backend = None
    if REPO_ID not in local_kernels():
        backend = request.getfixturevalue("native_backend")
        os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={request.getfixturevalue('variant').parent}"
    return kernels.get_kernel(REPO_ID, version=1, backend=backend, trust_remote_code=True)


def local_kernels() -> set[str]:
    """Repositories that LOCAL_KERNELS, `<repository>=<folder>:...`, names."""
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    return {repository for repository, sign, _ in (entry.partition("=") for entry in entries) if sign}


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest):
    """Each device that is there, as the one on which tensors are made."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_toy_kernel(tmp_path / "toy")
