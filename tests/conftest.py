"""What tests share: the repository, its variant for CPUs, built once and loaded as users load it, and a toy kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import kernels
import pytest
from toy_kernel import write_toy_kernel

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/optimizer"
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def variant(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Imported here: the Hub's builder runs tests without the folder tools/.
    from build import build_variants

    (built,) = build_variants(repository, ["cpu"], tmp_path_factory.mktemp("build"))
    return built.path


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest):
    """The package as `get_kernel` returns it; where a builder has set LOCAL_KERNELS, the build that it names."""
    if f"{REPO_ID}=" not in os.environ.get("LOCAL_KERNELS", ""):
        os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={request.getfixturevalue('variant').parent}"
    return kernels.get_kernel(REPO_ID, version=1, trust_remote_code=True)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_toy_kernel(tmp_path / "toy")
