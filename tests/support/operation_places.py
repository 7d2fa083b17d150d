"""By what the compiled operations of a test run: the shipped library, and the CUDA kernels on the model of CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHIPPED = "shipped"
MODELLED = "modelled"  # the host reads numbers, seeds and gates, as it does where they are on the CPU
MODELLED_ON_DEVICE = "modelled_on_device"  # kernels read them, as they do where they are on the GPU
TOOLS = Path(__file__).resolve().parents[2] / "tools"


def on_every_place(*places: str) -> pytest.MarkDecorator:
    """Run a test with `kernel` by each place, or by those named; by the shipped library alone where LOCAL_KERNELS says
    what is tested, and where nothing can be built.
    """
    can_build = TOOLS.is_dir() and not os.environ.get("LOCAL_KERNELS")
    places = (places or (SHIPPED, MODELLED, MODELLED_ON_DEVICE)) if can_build else (SHIPPED,)
    return pytest.mark.parametrize("kernel", places, indirect=True, scope="session")


def place_of(item: pytest.Item) -> str:
    """Return by what the operations of a test run."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("kernel", SHIPPED) if callspec else SHIPPED


def is_possible(item: pytest.Item) -> bool:
    """Whether a test's tensors are where its operations take them: the model's are on the CPU."""
    return place_of(item) == SHIPPED or item.callspec.params.get("device") != "cuda"
