"""What tests share: a variant on this machine with the pin that its user wrote down, and one of another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compiled_variants import write_compiled_variant
from tests.support.other_machine import OTHER, missing_for
from tools.build.variants import build_variants
from tools.pins.verify import pin_of


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A plain folder with a variant, whose pin is `pin_of` it before a test changes it."""
    return write_compiled_variant(tmp_path / "build")


@pytest.fixture
def pin(copy: Path) -> str:
    return pin_of(copy)


@pytest.fixture(scope="session")
def other_cuda_variant(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA variant of the other machine, by the cross compiler."""
    missing = missing_for(OTHER, "cuda")
    if missing:
        pytest.skip(missing)
    (built,) = build_variants(repository, ["cuda"], tmp_path_factory.mktemp("other"), OTHER)
    return built.path
