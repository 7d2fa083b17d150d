"""Starts below Triton's launcher: the driver gets what it gets from the launcher itself.

No GPU is needed: Triton compiles for one that is not there, its launcher runs as it is, and in the place of the driver
stands one that keeps what it is to launch.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.stubbed_driver import stubbed_gpu
from tools.lint import cases, compiled

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, as Triton does"),
    # A process has one driver: Triton would launch on that of the GPU here, and later tests on the stub.
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a process that has no driver"),
]

ABC = 1.5, -0.5, 0.25
SIZES = {"i32": 4, "fp32": 4, "i64": 8}
DESCRIPTOR = [128, 4, 4, 4, 8, 8, 8]  # a tensor map, then shape and strides of three dimensions
BYTES_OF_FACTS, SCRATCHES = 10 * 8, [8, 8]


class Kept:
    """What the driver gets of a launch of one kernel: grid, block, stream, number of attributes, every parameter."""

    def __init__(self, driver: ctypes.CDLL, kernel):
        sizes = [size for kind in kernel.src.signature.values() for size in sizes_of(kind)] + SCRATCHES
        self._sizes = (ctypes.c_long * (len(sizes) + 1))(*sizes, 0)
        self._bytes = ctypes.create_string_buffer(BYTES_OF_FACTS + sum(sizes))
        driver.keep_launches(self._bytes, self._sizes)

    def of(self, launch, *arguments) -> bytes:
        """Return what the driver gets when `launch` is called."""
        ctypes.memset(self._bytes, 0xFF, len(self._bytes))
        launch(*arguments)
        return self._bytes.raw


def sizes_of(kind: str) -> list[int]:
    if kind == "constexpr":
        return []
    return DESCRIPTOR if kind.startswith("tensordesc") else [8 if kind.startswith("*") else SIZES[kind]]


@pytest.fixture(params=["sm_80", "sm_90"])
def driver(request) -> Iterator[ctypes.CDLL]:
    with stubbed_gpu(request.param, compiled.PACKAGE) as driver:
        yield driver
        driver.keep_launches(None, None)


@pytest.fixture
def launch_cache():
    return compiled.kernel_module(compiled.PACKAGE, "gpu.launch_cache")


def new(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def launched_by_triton(launch_cache, operands: tuple):
    return launch_cache.launch_symmetric_gemm(*operands, ABC, launch_cache.chosen_for(*operands))


def arranged(launch_cache, operands: tuple):
    return launch_cache.arrange(*operands, launch_cache.chosen_for(*operands))


def start_of(launch_cache, operands: tuple):
    """Return the kernel, and what starts it for operands laid out like these, as a function of operands."""
    kernel = launched_by_triton(launch_cache, operands)
    start = launch_cache.prepare(*operands[:2], arranged(launch_cache, operands), kernel)
    return kernel, lambda A, B, D, C: start(A, B, C if D is None else D, C, *ABC)


@pytest.mark.parametrize("layout", ["wide", "tall", "square", "commuting", "repeated", "spread"])
def test_the_driver_gets_what_it_gets_from_tritons_launcher(driver, launch_cache, layout):
    """With operands at other addresses than those of the first launch, and once more with the same."""
    first, second = (cases.LAYOUTS[layout](new, 64, 128) for _ in range(2))
    kernel, start = start_of(launch_cache, first)
    kept = Kept(driver, kernel)
    for operands in (first, second, second, first):
        expected = kept.of(launched_by_triton, launch_cache, operands)
        assert kept.of(start, *operands) == expected
    assert kept.of(start, *first) != kept.of(start, *second)


def test_it_gets_the_same_where_the_part_below_the_launcher_is_not_known(driver, launch_cache):
    operands = cases.LAYOUTS["wide"](new, 64, 128)
    starts = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts")
    kernel, direct = start_of(launch_cache, operands)
    with mock.patch.object(starts, "_part_in_c", lambda run, panels: None):
        _, whole = start_of(launch_cache, operands)
    kept = Kept(driver, kernel)
    assert kept.of(direct, *operands) == kept.of(whole, *operands)


def test_starts_go_below_the_launcher_of_this_triton(driver, launch_cache):
    """Or they would cost as much as Triton's launcher, which no result would show."""
    starts = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts")
    for layout in "wide", "spread":  # by descriptors, where the GPU has them, and by addresses
        operands = cases.LAYOUTS[layout](new, 64, 128)
        kernel, panels = launched_by_triton(launch_cache, operands), len(arranged(launch_cache, operands).blocks)
        assert starts._part_in_c(kernel.run, panels) is not None


def test_few_descriptors_are_kept(launch_cache):
    """However many buffers a program has, and none is made twice while it is kept."""
    starts, made = compiled.kernel_module(compiled.PACKAGE, "gpu.triton_starts"), []
    kept = starts.Descriptors(lambda panel: made.append(panel.data_ptr()) or [panel.address], [1], [1])
    for address in [*range(1000), *range(900, 1000)]:
        assert kept[address] == (address,)
        assert len(kept) <= starts.MAX_DESCRIPTORS
    assert made == list(range(1000))
