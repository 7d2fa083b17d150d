"""What tests share: the repository, its variant for CPUs, built once a run, and a toy kernel that builds in a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from toy_kernel import write_toy_kernel

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_toy_kernel(tmp_path / "toy")
