"""What the tests of libraries share. A file whose library is not installed is left out: its name is the package's."""

from importlib import metadata
from pathlib import Path

import pytest
import torch


def installed(file: Path) -> bool:
    try:
        metadata.version(file.stem.removeprefix("test_"))
    except metadata.PackageNotFoundError:
        return False
    return True


collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py") if not installed(file)]


@pytest.fixture
def optimizer(kernel):
    """The package, under the name that its users give it."""
    return kernel


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)
