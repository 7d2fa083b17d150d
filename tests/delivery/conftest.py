"""What tests of verification share: a variant on this machine, and the pin that its user wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compiled_variants import write_compiled_variant
from tools.pins.verify import pin_of


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A plain folder with a variant, whose pin is `pin_of` it before a test changes it."""
    return write_compiled_variant(tmp_path / "build")


@pytest.fixture
def pin(copy: Path) -> str:
    return pin_of(copy)
